#ifndef TURBOBUS_SCHED_SPLIT_H_
#define TURBOBUS_SCHED_SPLIT_H_

#include <cstdint>
#include <span>
#include <vector>

namespace turbobus::sched {

/// What a planner that issues everything at once knows about a lane.
struct SplitLane {
  double bandwidth_bytes_per_s = 0;
  /// From the issue of its last block to that block's arrival, beyond its
  /// bytes.
  int64_t latency_ns = 0;
  /// Queued on this very lane: done before the new bytes start.
  int64_t fifo_bytes = 0;
  /// Of other lanes on the same link: they share it evenly with the new bytes.
  int64_t shared_bytes = 0;
  /// The most this lane may take; a lane that backed off gets a probe only.
  int64_t max_bytes = INT64_MAX;
};

struct SplitOptions {
  /// Shares are multiples of this, but for the one that takes what is left.
  int64_t alignment_bytes = 4096;
  /// A smaller share of a relay is not worth its calls.
  int64_t min_relay_bytes = 512 << 10;
  /// Relays are used only if they shorten the transfer by this part of it.
  double min_gain = 0.03;
};

/// When `lane` would have copied `bytes`, in ns from now.
double FinishNs(const SplitLane& lane, double bytes);

/// Bytes for each lane, so that all finish at the same time: the finish-time
/// rule where no decision can be taken later. `lanes[0]` is the direct lane and
/// takes whatever the others do not; the rest are relays.
///
/// A relay gets nothing if the direct lane alone would be no later, so pooling
/// is never expected to lose. Pure; the shares add up to `size_bytes`.
std::vector<int64_t> Split(std::span<const SplitLane> lanes, int64_t size_bytes,
                           const SplitOptions& options = {});

/// Cuts a lane's share into blocks of at most `block_bytes`. Relays get short
/// blocks at the end of their slower leg's pipeline (`is_tapered`), because the
/// last block's second leg is not hidden by anything.
std::vector<int64_t> CutBlocks(int64_t share_bytes, int64_t block_bytes,
                               bool is_tapered);

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_SPLIT_H_

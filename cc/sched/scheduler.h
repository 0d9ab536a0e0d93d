#ifndef TURBOBUS_SCHED_SCHEDULER_H_
#define TURBOBUS_SCHED_SCHEDULER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "topo/path.h"

namespace turbobus::sched {

using TransferId = int64_t;
using BlockId = int64_t;

enum class Mode : uint8_t {
  /// Every lane takes its next block as soon as its window has room.
  kFreeRunning = 0,
  /// The paper's slots: one block a lane, then all lanes synchronise.
  kLockStep = 1,
};

struct LaneSpec {
  topo::Path path;
  /// Bytes the lane allows in flight. Lanes that lend one GPU's link in one
  /// direction share its staging: together they keep to the largest of their
  /// windows, in equal parts between those that have something to copy.
  int64_t window_bytes = 32 << 20;
  /// Caps (indices into `Config::caps`) that this lane draws on.
  std::vector<int> caps = {};
};

/// A slow resource that several lanes share: a link, a link group, a NUMA
/// node's memory. Direct lanes with work come first; relays get what those
/// leave.
struct CapSpec {
  std::string name;
  double bandwidth_bytes_per_s = 0;
};

struct Config {
  std::vector<LaneSpec> lanes;
  std::vector<CapSpec> caps;
  Mode mode = Mode::kFreeRunning;
  int64_t block_bytes = 16 << 20;
  /// A transfer of more than this is large. It is queued chunk by chunk, and
  /// relays work for it only while it holds its GPU's token.
  int64_t chunk_bytes = 128 << 20;
  /// Whether relays wait for the token. Off only to measure what it is worth.
  bool has_token_gate = true;
  /// A relay whose blocks keep taking more than this times their expected time
  /// backs off: it gets one small block a probe interval, twice as long after
  /// each probe that was late, until one is on time.
  double late_factor = 1.25;
  int64_t probe_interval_ns = 5'000'000;
  int64_t max_probe_interval_ns = 80'000'000;
};

struct Transfer {
  TransferId id = 0;
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  int64_t size_bytes = 0;
  /// Where the host memory lies. Lanes whose path ends on that node serve the
  /// transfer; if its GPU has none, those of the first node it has lanes for.
  int numa_node = 0;
};

struct Block {
  BlockId id = 0;
  TransferId transfer = 0;
  int lane = 0;
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
  /// How often these bytes have failed before. The scheduler sets no limit: a
  /// driver that has seen enough cancels the transfer.
  int num_failures = 0;
};

/// What a lane is doing, for statistics and tests.
struct LaneState {
  int64_t in_flight_bytes = 0;
  int64_t num_issued_blocks = 0;
  int64_t issued_bytes = 0;
  /// Recent block time over expected block time, at least 1.
  double lateness = 1;
  bool is_backed_off = false;
  bool is_removed = false;
};

/// A transfer that has nothing left to copy.
struct Finished {
  TransferId transfer = 0;
  /// Cancelled transfers finish once their last block in flight has ended.
  bool is_cancelled = false;
};

/// Decides which block of which transfer each lane copies next (PAPERS,
/// TurboBus, "Executor" and "Scheduler"; terms as in docs/scheduler.md).
///
/// A pure state machine: events in, blocks out. It reads no clock (`now_ns` is
/// whatever its driver says, never decreasing), owns no thread, touches no
/// bytes. Not thread-safe: one driver calls it.
class Scheduler {
 public:
  /// Fails with INVALID_ARGUMENT, naming the field, on a config that cannot
  /// work: no lanes, a lane with no rate, an unknown cap, a negative size.
  static StatusOr<std::unique_ptr<Scheduler>> Create(Config config);

  virtual ~Scheduler() = default;

  /// The data of `transfer` is ready: it arrives now. INVALID_ARGUMENT for an
  /// id in use, a negative size or a GPU and direction without a direct lane;
  /// UNAVAILABLE if every lane that could serve it has been removed. A transfer
  /// of no bytes finishes at once (see `TakeFinished`).
  virtual Status Submit(const Transfer& transfer, int64_t now_ns) = 0;

  /// The next block to issue; the driver calls until there is none.
  virtual std::optional<Block> Next(int64_t now_ns) = 0;

  /// `block` has been copied. NOT_FOUND if it is not in flight.
  virtual Status Complete(BlockId block, int64_t now_ns) = 0;

  /// `block` could not be copied: its bytes are queued again. What failed on a
  /// relay goes to the direct lane; what failed there, to a relay that is free,
  /// and else there again. A relay that fails backs off. NOT_FOUND if it is not
  /// in flight.
  virtual Status Fail(BlockId block, int64_t now_ns) = 0;

  /// Issues no further block of `transfer`. NOT_FOUND if it is unknown.
  virtual Status Cancel(TransferId transfer, int64_t now_ns) = 0;

  /// The lane is gone; its blocks in flight are queued again and must no longer
  /// be completed. Without their direct lane, transfers live on relays alone.
  /// The last lane can go too: its transfers are then returned by
  /// `TakeStranded` and forgotten. NOT_FOUND if there is no such lane (any
  /// more).
  virtual Status RemoveLane(int lane, int64_t now_ns) = 0;

  /// Transfers finished since the last call, in order.
  virtual std::vector<Finished> TakeFinished() = 0;
  /// Transfers that no remaining lane can serve, since the last call.
  virtual std::vector<TransferId> TakeStranded() = 0;

  /// When to call `Next` again although nothing has happened (a lane that
  /// backed off is due a probe), or none.
  virtual std::optional<int64_t> NextWakeupNs() const = 0;

  /// Whether every transfer has finished, been stranded, or never come.
  virtual bool is_idle() const = 0;

  /// Makes the next `Next` consider every lane again. Never needed: tests prove
  /// that it yields no block that `Next` had not found.
  virtual void Rescan() = 0;

  /// `lane` must be an index into `Config::lanes`.
  virtual LaneState lane_state(int lane) const = 0;
};

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_SCHEDULER_H_

#include "sched/split.h"

#include <algorithm>

namespace turbobus::sched {
namespace {

constexpr double kNsPerS = 1e9;
/// A tapered share ends in blocks of about this size: shorter ones cost the
/// host more than they hide.
constexpr int64_t kShortestTailBytes = 2 << 20;

double NsFor(const SplitLane& lane, double bytes) {
  return bytes / lane.bandwidth_bytes_per_s * kNsPerS;
}

/// Bytes that `lane` has copied `time_ns` from now: the inverse of `FinishNs`.
double BytesBy(const SplitLane& lane, double time_ns) {
  const double own_ns = time_ns - static_cast<double>(lane.latency_ns) -
                        NsFor(lane, static_cast<double>(lane.fifo_bytes));
  if (own_ns <= 0) return 0;
  const double bytes = own_ns / kNsPerS * lane.bandwidth_bytes_per_s;
  const auto shared = static_cast<double>(lane.shared_bytes);
  const double moved = bytes <= 2 * shared ? bytes / 2 : bytes - shared;
  return std::min(moved, static_cast<double>(lane.max_bytes));
}

}  // namespace

double FinishNs(const SplitLane& lane, double bytes) {
  const double others = std::min(bytes, static_cast<double>(lane.shared_bytes));
  return static_cast<double>(lane.latency_ns) +
         NsFor(lane, static_cast<double>(lane.fifo_bytes) + bytes + others);
}

std::vector<int64_t> Split(std::span<const SplitLane> lanes, int64_t size_bytes,
                           const SplitOptions& options) {
  std::vector<int64_t> shares(lanes.size(), 0);
  if (lanes.empty()) return shares;
  shares[0] = size_bytes;
  if (lanes.size() == 1 || size_bytes <= 0) return shares;

  const auto size = static_cast<double>(size_bytes);
  const double direct_ns = FinishNs(lanes[0], size);
  // The time by which all lanes together have moved everything. They have by
  // `direct_ns`, since one of them has.
  double low = 0;
  double high = direct_ns;
  for (int i = 0; i < 48; ++i) {
    const double middle = (low + high) / 2;
    double moved = 0;
    for (const SplitLane& lane : lanes) moved += BytesBy(lane, middle);
    (moved < size ? low : high) = middle;
  }
  if (high > (1 - options.min_gain) * direct_ns) return shares;

  for (size_t i = 1; i < lanes.size(); ++i) {
    int64_t share = static_cast<int64_t>(BytesBy(lanes[i], high));
    share -= share % options.alignment_bytes;
    share = std::min(share, shares[0]);
    if (share < options.min_relay_bytes) continue;
    shares[i] = share;
    shares[0] -= share;
  }
  return shares;
}

std::vector<int64_t> CutBlocks(int64_t share_bytes, int64_t block_bytes,
                               bool is_tapered) {
  std::vector<int64_t> blocks;
  if (share_bytes <= 0) return blocks;
  blocks.reserve(share_bytes / block_bytes + 6);
  int64_t left = share_bytes;
  while (left > 0) {
    int64_t block = std::min(left, block_bytes);
    if (is_tapered && left < 2 * block_bytes && left > kShortestTailBytes) {
      // Halves, in steps that keep blocks aligned for the copy engines.
      const int64_t half = (left / 2 + 4095) / 4096 * 4096;
      block = std::clamp<int64_t>(half, std::min(kShortestTailBytes, left),
                                  std::min(left, block_bytes));
    }
    blocks.push_back(block);
    left -= block;
  }
  return blocks;
}

}  // namespace turbobus::sched

#ifndef TURBOBUS_SCHED_BLOCK_SIZE_H_
#define TURBOBUS_SCHED_BLOCK_SIZE_H_

#include <algorithm>
#include <cstdint>

namespace turbobus::sched {

inline constexpr int64_t kMinBlockBytes = 1 << 20;
inline constexpr int64_t kBlockAlignment = 256 << 10;
/// A middling transfer is cut into about this many blocks, so that four lanes
/// that share a cap still end together: with eight, one lane's third block made
/// the whole up to 1.4 times as long as equal shares.
inline constexpr int64_t kBlocksOfMiddlingTransfer = 16;

/// Under half a block: too little to be worth a relay or a cut.
inline bool IsSmall(int64_t size_bytes, int64_t block_bytes) {
  return size_bytes < (block_bytes + 1) / 2;
}

/// The block size for a transfer: all of a small one; `block_bytes` for one of
/// at least sixteen such blocks; in between a sixteenth of it, in steps of 256
/// KiB and at least 1 MiB.
inline int64_t BlockBytes(int64_t size_bytes, int64_t block_bytes) {
  if (IsSmall(size_bytes, block_bytes)) return std::max<int64_t>(size_bytes, 1);
  if (block_bytes <= kMinBlockBytes) return block_bytes;
  const int64_t share = size_bytes / kBlocksOfMiddlingTransfer;
  const int64_t aligned =
      (share + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  return std::clamp(aligned, kMinBlockBytes, block_bytes);
}

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_BLOCK_SIZE_H_

#ifndef TURBOBUS_TRANSPORT_CUDA_PEER_MEMORY_H_
#define TURBOBUS_TRANSPORT_CUDA_PEER_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace turbobus::transport::cuda {

/// OK if `gpu` may read and write at `address`, which is device memory;
/// UNAVAILABLE if not. Asks the driver.
Status AskForPeerMemory(int gpu, const void* address);

/// The same of several GPUs, for the calls of an exchange: each thread keeps in
/// mind which allocations it has asked about (`KnownMemory`).
Status CheckPeerMemory(std::span<const int> gpus, const void* address);

/// The allocations that were found open to GPUs, the last ones of them. One
/// that is freed stays: what comes to lie there is of the same allocator.
class KnownMemory {
 public:
  /// Whether all of `gpus`, a bit each, may touch `address`.
  bool Has(uintptr_t address, uint64_t gpus) const {
    for (const Range& range : ranges_) {
      if (address - range.begin < range.size_bytes &&
          (range.gpus & gpus) == gpus) {
        return true;
      }
    }
    return false;
  }

  void Add(uintptr_t begin, size_t size_bytes, uint64_t gpus) {
    ranges_[next_] = {begin, size_bytes, gpus};
    next_ = (next_ + 1) % ranges_.size();
  }

  static constexpr size_t kNumRanges = 16;

 private:
  struct Range {
    uintptr_t begin = 0;
    size_t size_bytes = 0;
    uint64_t gpus = 0;
  };
  std::array<Range, kNumRanges> ranges_;
  size_t next_ = 0;
};

}  // namespace turbobus::transport::cuda

#endif  // TURBOBUS_TRANSPORT_CUDA_PEER_MEMORY_H_

#ifndef TURBOBUS_MOE_CUDA_RING_TIMING_H_
#define TURBOBUS_MOE_CUDA_RING_TIMING_H_

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "moe/cuda/ring.h"
#include "moe/cuda/wiring.h"

namespace turbobus::moe::cuda {

/// From the memory of one GPU into that of another, CUDA ordinals; or of the
/// same, whose link then carries both ways.
struct Way {
  int source = 0;
  int reader = 0;
  Path path;
};

/// Moves `size_bytes` along every way, all at the same time, as exchanges do:
/// in their blocks, through rings of `size`, enqueued by a host thread a way.
///
/// Returns for each way the seconds from the start until its reader had
/// everything, the least of `repeats` after one that does not count. Blocks
/// until all is over; frees what it took: 2 x `size_bytes` of device memory and
/// a ring a way.
StatusOr<std::vector<double>> TimeWays(const std::vector<Way>& ways,
                                       int64_t size_bytes, RingSize size,
                                       int repeats);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RING_TIMING_H_

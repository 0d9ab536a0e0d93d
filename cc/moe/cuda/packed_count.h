#ifndef TURBOBUS_MOE_CUDA_PACKED_COUNT_H_
#define TURBOBUS_MOE_CUDA_PACKED_COUNT_H_

#include <cstdint>

#include "base/status.h"
#include "moe/cuda/gpu_exchange.h"

// Counting the rows of packed dispatches to come (`GpuCount`): one meeting for
// all of them, kernels on the caller's stream. What they find lies in mail, and
// `KnownTotals::Early` knows where.

namespace turbobus::moe::cuda {

int64_t PackedScratchBytes(const Caller& caller, const GpuCount& call);

/// As `RunCount`, of ranks that do not reach each other's memory.
Status PackedCount(const Caller& caller, const GpuCount& call);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_PACKED_COUNT_H_

#ifndef TURBOBUS_MOE_CUDA_PACKED_EXCHANGE_H_
#define TURBOBUS_MOE_CUDA_PACKED_EXCHANGE_H_

#include <cstdint>

#include "base/status.h"
#include "moe/cuda/gpu_exchange.h"

// The exchanges of ranks whose kernels do not reach each other's memory
// (docs/gpu_exchange.md, "Without peer access"). Results are the direct ones,
// bit for bit.
//
// Tables (counts, ids, positions, weights) always travel in mail: pinned host
// memory. Rows of small batches do too, written and read by kernels; those of
// others are packed on the device and copied by rings, for which the host waits
// until it knows how many there are.

namespace turbobus::moe::cuda {

int64_t PackedScratchBytes(const Caller& caller, const GpuDispatch& call);
int64_t PackedScratchBytes(const Caller& caller, const GpuCombine& call);
int64_t PackedScratchBytes(const Caller& caller, const GpuCombineGrad& call);

// As the functions without "Packed".
Status PackedDispatch(const Caller& caller, const GpuDispatch& call);
Status PackedCombine(const Caller& caller, const GpuCombine& call);
Status PackedCombineGrad(const Caller& caller, const GpuCombineGrad& call);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_PACKED_EXCHANGE_H_

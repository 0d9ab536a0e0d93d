#ifndef TURBOBUS_MOE_CUDA_PACKED_RAGGED_H_
#define TURBOBUS_MOE_CUDA_PACKED_RAGGED_H_

#include "base/status.h"
#include "moe/cuda/gpu_ragged.h"

namespace turbobus::moe::cuda {

// `ragged_all_to_all` where not all ranks reach each other's memory: rows are
// packed by peer and go by ring (docs/gpu_exchange.md), as moe/ragged_parcels.h
// plans it. The host waits for the ranks' tables, so that a slice that does not
// fit is INVALID_ARGUMENT at once, on all ranks.

Status PackedRaggedPush(const Caller& caller, const GpuRagged& call);
Status PackedRaggedSum(const Caller& caller, const GpuRagged& call);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_PACKED_RAGGED_H_

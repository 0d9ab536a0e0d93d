#ifndef TURBOBUS_MOE_CUDA_GPU_RAGGED_H_
#define TURBOBUS_MOE_CUDA_GPU_RAGGED_H_

#include <cstdint>
#include <functional>

#include "base/status.h"
#include "moe/cuda/gpu_exchange.h"
#include "moe/cuda/ragged.h"

// `ragged_all_to_all` of one rank on one GPU (docs/gpu_exchange.md). As the
// exchanges in gpu_exchange.h: each call enqueues and returns, blocks only
// while it meets, and owns none of the memory.

namespace turbobus::moe::cuda {

struct GpuRagged {
  RaggedSizes sizes;
  DType dtype = DType::kOther;     // Of a transpose.
  const int32_t* table = nullptr;  // s32[num_tables, 4, num_slices]
  /// Forward: the operand; transpose: the cotangent of the result.
  const uint8_t* source = nullptr;
  /// Forward: holds `output` already, unless that is zeros; transpose: whatever
  /// was there before.
  uint8_t* result = nullptr;
  bool is_onto_zeros = false;  // Forward: `output` is zeros.
  void* scratch = nullptr;     // As the kernel wants it.
  /// Device memory that is the call's until its stream has passed it: how much,
  /// is known only when the tables are. Not asked where the wiring is direct.
  std::function<StatusOr<void*>(int64_t size_bytes)> allocate;
};

// DEADLINE_EXCEEDED if a rank does not come, INTERNAL if an enqueue fails, on
// all ranks of the call. INVALID_ARGUMENT, likewise, if an earlier call of the
// process had a slice that did not fit: which nobody knew before its kernel
// ran; without peer access, if this call has one.
Status RunRaggedPush(const Caller& caller, const GpuRagged& call);
Status RunRaggedSum(const Caller& caller, const GpuRagged& call);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_GPU_RAGGED_H_

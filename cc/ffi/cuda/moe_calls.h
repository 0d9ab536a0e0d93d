#ifndef TURBOBUS_FFI_CUDA_MOE_CALLS_H_
#define TURBOBUS_FFI_CUDA_MOE_CALLS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "base/status.h"
#include "ffi/moe_decode.h"
#include "moe/cuda/gpu_exchange.h"
#include "xla/ffi/api/ffi.h"

// The exchanges of one GPU on XLA's buffers: operands checked, scratch taken,
// batches run one after the other. Handlers differ in the stream they give.

namespace turbobus::ffi {

using AnyBuffer = xla::ffi::AnyBuffer;

/// The attributes of an exchange on GPUs.
struct GpuExchange {
  std::string_view axis;
  int64_t num_experts = 0;
  int64_t expert_capacity = 0;
  int64_t schedule = 0;
  /// Whether the slots that it reads are known to be those that a dispatch of
  /// the same run by the same ids returned, as the program was written.
  bool is_counted = false;
  // Where the ranks are: one entry a device of the program. Those that exchange
  // with each other share a number in `groups`.
  xla::ffi::Span<const int64_t> devices;  // CUDA ordinals.
  xla::ffi::Span<const int64_t> ranks;
  xla::ffi::Span<const int64_t> groups;

  Attributes Named(std::string_view op) const {
    return {op, axis, num_experts, expert_capacity, schedule};
  }
};

/// The attributes of a count: of the dispatches that it is for.
struct GpuEarlyCount {
  std::string_view axis;
  int64_t num_experts = 0;
  int64_t expert_capacity = 0;
  int64_t schedule = 0;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  xla::ffi::Span<const int64_t> devices;
  xla::ffi::Span<const int64_t> ranks;
  xla::ffi::Span<const int64_t> groups;
};

/// Where a call runs.
struct GpuContext {
  cudaStream_t stream = nullptr;
  int32_t device = 0;
  int64_t run_id = 0;
  /// Device memory that is the call's until `stream` has passed it.
  std::function<StatusOr<void*>(int64_t size_bytes)> allocate;
};

/// The program's own stream, and memory from XLA's pool: `scratch` must outlive
/// the context.
GpuContext OnStream(cudaStream_t stream, int32_t device, xla::ffi::RunId run_id,
                    xla::ffi::ScratchAllocator& scratch);

/// Tells the ranks that wait for the caller why it cannot go on, and returns
/// that with the name of the call.
Status TellOthers(const moe::cuda::Caller& caller, const Status& reason);

/// Who makes the call `op`, which counts as the next one of its run. Only
/// `axis` and where the ranks are is read of `exchange`.
StatusOr<moe::cuda::Caller> FindCaller(const GpuContext& context,
                                       const GpuExchange& exchange,
                                       std::string_view op);

// Each enqueues on the context's stream and returns; it blocks only while it
// meets the other ranks. An error is every rank's of the call.

Status DispatchOnGpu(const GpuContext& context, const GpuExchange& exchange,
                     const AnyBuffer& tokens, const AnyBuffer& expert_ids,
                     const AnyBuffer& rows, const AnyBuffer& group_sizes,
                     const AnyBuffer& wanted, const AnyBuffer& slots,
                     const AnyBuffer* early = nullptr);

/// The ids of dispatches to come, and for each what names its count.
Status CountOnGpu(const GpuContext& context, const GpuEarlyCount& count,
                  std::span<const AnyBuffer> expert_ids,
                  std::span<const AnyBuffer> slots);

/// Combine, and with `weights` null the transpose of dispatch.
Status CombineOnGpu(const GpuContext& context, const GpuExchange& exchange,
                    const AnyBuffer& rows, const AnyBuffer& expert_ids,
                    const AnyBuffer& slots, const AnyBuffer* weights,
                    const AnyBuffer& sums);

Status CombineGradOnGpu(const GpuContext& context, const GpuExchange& exchange,
                        const AnyBuffer& sum_grads, const AnyBuffer& rows,
                        const AnyBuffer& expert_ids, const AnyBuffer& slots,
                        const AnyBuffer& weights, const AnyBuffer& group_sizes,
                        const AnyBuffer& row_grads,
                        const AnyBuffer& weight_grads);

}  // namespace turbobus::ffi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    turbobus::ffi::GpuExchange,
    xla::ffi::StructMember<std::string_view>("axis"),
    xla::ffi::StructMember<int64_t>("num_experts"),
    xla::ffi::StructMember<int64_t>("expert_capacity"),
    xla::ffi::StructMember<int64_t>("schedule"),
    xla::ffi::StructMember<bool>("is_counted"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("devices"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("ranks"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    turbobus::ffi::GpuEarlyCount,
    xla::ffi::StructMember<std::string_view>("axis"),
    xla::ffi::StructMember<int64_t>("num_experts"),
    xla::ffi::StructMember<int64_t>("expert_capacity"),
    xla::ffi::StructMember<int64_t>("schedule"),
    xla::ffi::StructMember<int64_t>("num_rows"),
    xla::ffi::StructMember<int64_t>("row_bytes"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("devices"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("ranks"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));

#endif  // TURBOBUS_FFI_CUDA_MOE_CALLS_H_

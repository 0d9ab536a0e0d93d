#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/cuda/targets.h"
#include "ffi/error.h"
#include "ffi/moe_decode.h"
#include "moe/cuda/gpu_exchange.h"

// The exchange handlers for GPUs: the operands of those for CPU devices, and
// three attributes that say where the ranks are (`devices`, `ranks`, `groups`,
// one entry a device of the program). The operands `keys` and `rank` are there
// for CPU devices only: reading them here would make the host wait.

namespace turbobus::ffi {
namespace {

using xla::ffi::AnyBuffer;
using Result = xla::ffi::Result<AnyBuffer>;
using Ints64 = xla::ffi::Span<const int64_t>;
using moe::cuda::Caller;
using moe::cuda::DType;
using moe::cuda::Shape;

/// What a handler gets from XLA beside operands.
struct Context {
  cudaStream_t stream = nullptr;
  int32_t device = 0;
  xla::ffi::RunId run_id;
  xla::ffi::ScratchAllocator* scratch = nullptr;
};

StatusOr<Caller> FindCaller(const Attributes& attributes,
                            const Context& context, Ints64 devices,
                            Ints64 ranks, Ints64 groups) {
  const std::string op =
      std::string(attributes.op) + " over axis " + std::string(attributes.axis);
  if (devices.size() != ranks.size() || devices.size() != groups.size()) {
    return Internal(op + ": devices, ranks, groups: different lengths");
  }
  const auto* at = std::find(devices.begin(), devices.end(), context.device);
  if (at == devices.end()) {
    return FailedPrecondition(
        op + ": runs on GPU " + std::to_string(context.device) +
        ", which is not in the mesh that it was compiled for");
  }
  const int64_t index = at - devices.begin();
  const int64_t num_ranks =
      std::count(groups.begin(), groups.end(), groups[index]);
  if (num_ranks > moe::cuda::kMaxRanks) {
    return Unimplemented(op + ": " + std::to_string(num_ranks) +
                         " GPUs in a group, at most " +
                         std::to_string(moe::cuda::kMaxRanks));
  }
  auto& meeting = moe::BlockingMeeting::Process();
  Caller caller;
  caller.op = op;
  caller.device = context.device;
  caller.rank = static_cast<int>(ranks[index]);
  caller.num_ranks = static_cast<int>(num_ranks);
  caller.key = {
      .run_id = context.run_id.run_id,
      .position = meeting.NextPosition(context.run_id.run_id, context.device),
      .group = groups[index]};
  caller.stream = context.stream;
  caller.meeting = &meeting;
  return caller;
}

StatusOr<Shape> ToShape(const Sizes& sizes, const Caller& caller) {
  const moe::ExchangeShape& from = sizes.config.shape;
  if (from.top_k > moe::cuda::kMaxTopK ||
      from.num_experts > moe::cuda::kMaxExperts) {
    return Unimplemented("top_k, num_experts: at most " +
                         std::to_string(moe::cuda::kMaxTopK) + " and " +
                         std::to_string(moe::cuda::kMaxExperts) +
                         " on GPUs, got " + std::to_string(from.top_k) +
                         " and " + std::to_string(from.num_experts));
  }
  Shape shape;
  shape.rank = caller.rank;
  shape.num_ranks = caller.num_ranks;
  shape.num_tokens = static_cast<int>(from.num_tokens);
  shape.top_k = from.top_k;
  shape.num_experts = from.num_experts;
  shape.num_local_experts = from.num_local_experts();
  shape.row_bytes = sizes.config.row_bytes;
  shape.num_rows = from.recv_capacity;
  shape.expert_capacity = static_cast<int>(from.expert_capacity);
  return shape;
}

DType ToDType(moe::Element element) {
  switch (element) {
    case moe::Element::kF32:
      return DType::kF32;
    case moe::Element::kF64:
      return DType::kF64;
    case moe::Element::kF16:
      return DType::kF16;
    case moe::Element::kBF16:
      return DType::kBF16;
  }
  return DType::kOther;
}

StatusOr<void*> Allocate(const Context& context, int64_t size_bytes) {
  const auto memory =
      context.scratch->Allocate(std::max<int64_t>(size_bytes, 1));
  if (!memory.has_value()) {
    return ResourceExhausted("no " + std::to_string(size_bytes) +
                             " bytes of device memory for scratch");
  }
  return *memory;
}

/// Entry `batch` of a buffer that has `num_batches` of them.
template <typename T = uint8_t>
T* Entry(const AnyBuffer& buffer, int64_t batch, int64_t num_batches) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(buffer.untyped_data()) +
                              batch * (buffer.size_bytes() / num_batches));
}

/// Calls `run(caller, batch)` for each entry of the leading axes. An error
/// before the meeting is told to the ranks that wait there.
template <typename Run>
Status ForBatches(Caller& caller, const Status& decoded, int64_t num_batches,
                  Run run) {
  if (!decoded.ok()) {
    caller.meeting->Fail(
        caller.key,
        {.op = caller.op, .rank = caller.rank, .num_ranks = caller.num_ranks},
        decoded);
    return decoded.WithContext(caller.op);
  }
  for (int64_t batch = 0; batch < num_batches; ++batch) {
    if (batch > 0) {
      caller.key.position =
          caller.meeting->NextPosition(caller.key.run_id, caller.device);
    }
    TB_RETURN_IF_ERROR(run(batch));
  }
  return OkStatus();
}

Status Dispatch(const Attributes& attributes, const Context& context,
                Caller caller, const AnyBuffer& tokens,
                const AnyBuffer& expert_ids, const AnyBuffer& rows,
                const AnyBuffer& group_sizes, const AnyBuffer& wanted,
                const AnyBuffer& slots, bool is_deduplicated) {
  moe::cuda::GpuDispatch call;
  int64_t num_batches = 1;
  const auto decode = [&]() -> Status {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, caller.num_ranks,
                                                  tokens, expert_ids, rows));
    TB_RETURN_IF_ERROR(CheckShape(slots, "slots", sizes.Choices()));
    TB_RETURN_IF_ERROR(
        CheckShape(group_sizes, "group_sizes", sizes.LocalExperts()));
    TB_RETURN_IF_ERROR(CheckShape(wanted, "wanted", sizes.LocalExperts()));
    TB_ASSIGN_OR_RETURN(call.shape, ToShape(sizes, caller));
    num_batches = sizes.config.num_batches;
    const moe::cuda::Shape& shape = call.shape;
    const int64_t plan_ints =
        PlanScratchBytes(shape) / static_cast<int64_t>(sizeof(int32_t));
    const int64_t arrivals_ints =
        static_cast<int64_t>(shape.num_ranks) * shape.num_tokens * shape.top_k;
    TB_ASSIGN_OR_RETURN(
        void* const scratch,
        Allocate(context, (shape.num_experts + plan_ints + arrivals_ints) *
                              static_cast<int64_t>(sizeof(int32_t))));
    call.counts = static_cast<int32_t*>(scratch);
    call.block_offsets = call.counts + shape.num_experts;
    call.arrivals = call.block_offsets + plan_ints;
    call.is_deduplicated = is_deduplicated;
    return OkStatus();
  };
  return ForBatches(caller, decode(), num_batches, [&](int64_t batch) {
    call.tokens = Entry(tokens, batch, num_batches);
    call.expert_ids = Entry<int32_t>(expert_ids, batch, num_batches);
    call.rows = Entry(rows, batch, num_batches);
    call.group_sizes = Entry<int32_t>(group_sizes, batch, num_batches);
    call.wanted = Entry<int32_t>(wanted, batch, num_batches);
    call.slots = Entry<int32_t>(slots, batch, num_batches);
    return RunDispatch(caller, call);
  });
}

/// Combine, and with `weights` null the transpose of dispatch.
Status Combine(const Attributes& attributes, const Context& context,
               Caller caller, const AnyBuffer& rows,
               const AnyBuffer& expert_ids, const AnyBuffer& slots,
               const AnyBuffer* weights, const AnyBuffer& sums) {
  moe::cuda::GpuCombine call;
  int64_t num_batches = 1;
  const auto decode = [&]() -> Status {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, caller.num_ranks,
                                                  sums, expert_ids, rows));
    TB_ASSIGN_OR_RETURN(const moe::Element element, DecodeElement(rows));
    TB_RETURN_IF_ERROR(CheckShape(slots, "slots", sizes.Choices()));
    if (weights != nullptr) {
      TB_RETURN_IF_ERROR(CheckShape(*weights, "weights", sizes.Choices()));
      TB_RETURN_IF_ERROR(CheckType(*weights, "weights", WeightType(element)));
    }
    TB_ASSIGN_OR_RETURN(call.shape, ToShape(sizes, caller));
    call.dtype = ToDType(element);
    num_batches = sizes.config.num_batches;
    TB_ASSIGN_OR_RETURN(
        void* const scratch,
        Allocate(context, call.shape.num_ranks * call.shape.row_bytes *
                              static_cast<int64_t>(call.shape.num_tokens)));
    call.partials = static_cast<uint8_t*>(scratch);
    return OkStatus();
  };
  return ForBatches(caller, decode(), num_batches, [&](int64_t batch) {
    call.rows = Entry(rows, batch, num_batches);
    call.expert_ids = Entry<int32_t>(expert_ids, batch, num_batches);
    call.slots = Entry<int32_t>(slots, batch, num_batches);
    if (weights != nullptr) call.weights = Entry(*weights, batch, num_batches);
    call.sums = Entry(sums, batch, num_batches);
    return RunCombine(caller, call);
  });
}

Status CombineGrad(const Attributes& attributes, Caller caller,
                   const AnyBuffer& sum_grads, const AnyBuffer& rows,
                   const AnyBuffer& expert_ids, const AnyBuffer& slots,
                   const AnyBuffer& weights, const AnyBuffer& group_sizes,
                   const AnyBuffer& row_grads, const AnyBuffer& weight_grads) {
  moe::cuda::GpuCombineGrad call;
  int64_t num_batches = 1;
  const auto decode = [&]() -> Status {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, caller.num_ranks,
                                                  sum_grads, expert_ids, rows));
    TB_ASSIGN_OR_RETURN(const moe::Element element, DecodeElement(rows));
    TB_RETURN_IF_ERROR(CheckShape(slots, "slots", sizes.Choices()));
    TB_RETURN_IF_ERROR(CheckShape(weights, "weights", sizes.Choices()));
    TB_RETURN_IF_ERROR(CheckType(weights, "weights", WeightType(element)));
    TB_RETURN_IF_ERROR(
        CheckShape(group_sizes, "group_sizes", sizes.LocalExperts()));
    TB_RETURN_IF_ERROR(CheckShape(row_grads, "row_grads", sizes.Rows()));
    TB_RETURN_IF_ERROR(
        CheckShape(weight_grads, "weight_grads", sizes.Choices()));
    TB_ASSIGN_OR_RETURN(call.shape, ToShape(sizes, caller));
    call.dtype = ToDType(element);
    num_batches = sizes.config.num_batches;
    return OkStatus();
  };
  return ForBatches(caller, decode(), num_batches, [&](int64_t batch) {
    call.sum_grads = Entry(sum_grads, batch, num_batches);
    call.rows = Entry(rows, batch, num_batches);
    call.expert_ids = Entry<int32_t>(expert_ids, batch, num_batches);
    call.slots = Entry<int32_t>(slots, batch, num_batches);
    call.weights = Entry(weights, batch, num_batches);
    call.group_sizes = Entry<int32_t>(group_sizes, batch, num_batches);
    call.row_grads = Entry(row_grads, batch, num_batches);
    call.weight_grads = Entry(weight_grads, batch, num_batches);
    return RunCombineGrad(caller, call);
  });
}

// The handlers: XLA's view of the above.

xla::ffi::Error DispatchHandler(cudaStream_t stream, int32_t device,
                                xla::ffi::RunId run_id,
                                xla::ffi::ScratchAllocator scratch, AnyBuffer,
                                AnyBuffer, AnyBuffer tokens,
                                AnyBuffer expert_ids, Result rows,
                                Result group_sizes, Result wanted, Result slots,
                                std::string_view axis, int64_t num_experts,
                                int64_t expert_capacity, int64_t schedule,
                                Ints64 devices, Ints64 ranks, Ints64 groups) {
  const Attributes attributes = {"dispatch", axis, num_experts, expert_capacity,
                                 schedule};
  const Context context = {stream, device, run_id, &scratch};
  auto caller = FindCaller(attributes, context, devices, ranks, groups);
  if (!caller.ok()) return ToError(caller.status());
  // With one choice a token has at most one row: nothing to expand.
  const bool is_deduplicated = expert_ids.dimensions().back() > 1;
  return ToError(Dispatch(attributes, context, *std::move(caller), tokens,
                          expert_ids, *rows, *group_sizes, *wanted, *slots,
                          is_deduplicated));
}

xla::ffi::Error CombineHandler(cudaStream_t stream, int32_t device,
                               xla::ffi::RunId run_id,
                               xla::ffi::ScratchAllocator scratch, AnyBuffer,
                               AnyBuffer, AnyBuffer rows, AnyBuffer expert_ids,
                               AnyBuffer slots, AnyBuffer weights, Result sums,
                               std::string_view axis, int64_t num_experts,
                               int64_t expert_capacity, int64_t schedule,
                               Ints64 devices, Ints64 ranks, Ints64 groups) {
  const Attributes attributes = {"combine", axis, num_experts, expert_capacity,
                                 schedule};
  const Context context = {stream, device, run_id, &scratch};
  auto caller = FindCaller(attributes, context, devices, ranks, groups);
  if (!caller.ok()) return ToError(caller.status());
  return ToError(Combine(attributes, context, *std::move(caller), rows,
                         expert_ids, slots, &weights, *sums));
}

xla::ffi::Error DispatchGradHandler(
    cudaStream_t stream, int32_t device, xla::ffi::RunId run_id,
    xla::ffi::ScratchAllocator scratch, AnyBuffer, AnyBuffer, AnyBuffer rows,
    AnyBuffer expert_ids, AnyBuffer slots, Result sums, std::string_view axis,
    int64_t num_experts, int64_t expert_capacity, int64_t schedule,
    Ints64 devices, Ints64 ranks, Ints64 groups) {
  const Attributes attributes = {"dispatch's gradient", axis, num_experts,
                                 expert_capacity, schedule};
  const Context context = {stream, device, run_id, &scratch};
  auto caller = FindCaller(attributes, context, devices, ranks, groups);
  if (!caller.ok()) return ToError(caller.status());
  return ToError(Combine(attributes, context, *std::move(caller), rows,
                         expert_ids, slots, nullptr, *sums));
}

xla::ffi::Error CombineGradHandler(
    cudaStream_t stream, int32_t device, xla::ffi::RunId run_id,
    xla::ffi::ScratchAllocator scratch, AnyBuffer, AnyBuffer,
    AnyBuffer sum_grads, AnyBuffer rows, AnyBuffer expert_ids, AnyBuffer slots,
    AnyBuffer weights, AnyBuffer group_sizes, Result row_grads,
    Result weight_grads, std::string_view axis, int64_t num_experts,
    int64_t expert_capacity, int64_t schedule, Ints64 devices, Ints64 ranks,
    Ints64 groups) {
  const Attributes attributes = {"combine's gradient", axis, num_experts,
                                 expert_capacity, schedule};
  const Context context = {stream, device, run_id, &scratch};
  auto caller = FindCaller(attributes, context, devices, ranks, groups);
  if (!caller.ok()) return ToError(caller.status());
  return ToError(CombineGrad(attributes, *std::move(caller), sum_grads, rows,
                             expert_ids, slots, weights, group_sizes,
                             *row_grads, *weight_grads));
}

#define TB_GPU_CONTEXT                               \
  xla::ffi::Ffi::Bind()                              \
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>() \
      .Ctx<xla::ffi::DeviceOrdinal>()                \
      .Ctx<xla::ffi::RunId>()                        \
      .Ctx<xla::ffi::ScratchAllocator>()             \
      .Arg<AnyBuffer>() /* keys */                   \
      .Arg<AnyBuffer>() /* rank */
#define TB_EXCHANGE_ATTRIBUTES          \
  .Attr<std::string_view>("axis")       \
      .Attr<int64_t>("num_experts")     \
      .Attr<int64_t>("expert_capacity") \
      .Attr<int64_t>("schedule")        \
      .Attr<Ints64>("devices")          \
      .Attr<Ints64>("ranks")            \
      .Attr<Ints64>("groups")

XLA_FFI_DEFINE_HANDLER(kDispatch, DispatchHandler,
                       TB_GPU_CONTEXT
                           .Arg<AnyBuffer>()  // tokens
                           .Arg<AnyBuffer>()  // expert_ids
                           .Ret<AnyBuffer>()  // rows
                           .Ret<AnyBuffer>()  // group_sizes
                           .Ret<AnyBuffer>()  // wanted
                           .Ret<AnyBuffer>()  // slots
                       TB_EXCHANGE_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER(kCombine, CombineHandler,
                       TB_GPU_CONTEXT
                           .Arg<AnyBuffer>()  // rows
                           .Arg<AnyBuffer>()  // expert_ids
                           .Arg<AnyBuffer>()  // slots
                           .Arg<AnyBuffer>()  // weights
                           .Ret<AnyBuffer>()  // sums
                       TB_EXCHANGE_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER(kDispatchGrad, DispatchGradHandler,
                       TB_GPU_CONTEXT
                           .Arg<AnyBuffer>()  // rows
                           .Arg<AnyBuffer>()  // expert_ids
                           .Arg<AnyBuffer>()  // slots
                           .Ret<AnyBuffer>()  // sums
                       TB_EXCHANGE_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER(kCombineGrad, CombineGradHandler,
                       TB_GPU_CONTEXT
                           .Arg<AnyBuffer>()  // sum_grads
                           .Arg<AnyBuffer>()  // rows
                           .Arg<AnyBuffer>()  // expert_ids
                           .Arg<AnyBuffer>()  // slots
                           .Arg<AnyBuffer>()  // weights
                           .Arg<AnyBuffer>()  // group_sizes
                           .Ret<AnyBuffer>()  // row_grads
                           .Ret<AnyBuffer>()  // weight_grads
                       TB_EXCHANGE_ATTRIBUTES);

#undef TB_GPU_CONTEXT
#undef TB_EXCHANGE_ATTRIBUTES

}  // namespace

std::vector<Target> CudaMoeTargets() {
  return {
      {"turbobus_moe_dispatch", kDispatch},
      {"turbobus_moe_dispatch_grad", kDispatchGrad},
      {"turbobus_moe_combine", kCombine},
      {"turbobus_moe_combine_grad", kCombineGrad},
  };
}

}  // namespace turbobus::ffi

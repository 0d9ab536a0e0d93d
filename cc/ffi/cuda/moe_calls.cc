#include "ffi/cuda/moe_calls.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/cuda/for_peers.h"
#include "ffi/moe_checks.h"
#include "moe/cuda/events.h"

namespace turbobus::ffi {
namespace {

using moe::cuda::Caller;
using moe::cuda::DType;
using moe::cuda::Shape;

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

/// Entry `batch` of bytes that are `num_batches` of them.
template <typename T = uint8_t>
T* Entry(const DeviceBytes& bytes, int64_t batch, int64_t num_batches) {
  return reinterpret_cast<T*>(bytes.data +
                              batch * (bytes.size_bytes / num_batches));
}

template <typename T = uint8_t>
T* Entry(const AnyBuffer& buffer, int64_t batch, int64_t num_batches) {
  return Entry<T>({static_cast<uint8_t*>(buffer.untyped_data()),
                   static_cast<int64_t>(buffer.size_bytes())},
                  batch, num_batches);
}

/// What peers read of a combine, and of its gradient.
struct Tables {
  DeviceBytes expert_ids;
  DeviceBytes slots;
  DeviceBytes weights;  // Null without.

  static StatusOr<Tables> For(const GpuContext& context, const Caller& caller,
                              const AnyBuffer& expert_ids,
                              const AnyBuffer& slots,
                              const AnyBuffer* weights) {
    Tables tables;
    TB_ASSIGN_OR_RETURN(
        tables.expert_ids,
        ReadableByPeers(context, caller, expert_ids, "expert_ids"));
    TB_ASSIGN_OR_RETURN(tables.slots,
                        ReadableByPeers(context, caller, slots, "slots"));
    if (weights == nullptr) return tables;
    TB_ASSIGN_OR_RETURN(tables.weights,
                        ReadableByPeers(context, caller, *weights, "weights"));
    return tables;
  }
};

/// Calls `run(batch, num_batches)` for each entry of the leading axes;
/// `decoded` is their number. An error before the meeting is told to the ranks
/// that wait there.
template <typename Run>
Status ForBatches(Caller& caller, const StatusOr<int64_t>& decoded, Run run) {
  if (!decoded.ok()) return TellOthers(caller, decoded.status());
  for (int64_t batch = 0; batch < *decoded; ++batch) {
    caller.batch = static_cast<int>(batch);
    if (batch > 0) {
      caller.key.position =
          caller.meeting->NextPosition(caller.key.run_id, caller.device);
    }
    TB_RETURN_IF_ERROR(run(batch, *decoded));
  }
  return OkStatus();
}

}  // namespace

GpuContext OnStream(cudaStream_t stream, int32_t device, xla::ffi::RunId run_id,
                    xla::ffi::ScratchAllocator& scratch) {
  return {.stream = stream,
          .device = device,
          .run_id = run_id.run_id,
          .allocate = [&scratch](int64_t size_bytes) -> StatusOr<void*> {
            const auto memory =
                scratch.Allocate(std::max<int64_t>(size_bytes, 1));
            if (memory.has_value()) return *memory;
            return ResourceExhausted("no " + std::to_string(size_bytes) +
                                     " bytes of device memory for scratch");
          }};
}

Status TellOthers(const Caller& caller, const Status& reason) {
  caller.meeting->Fail(
      caller.key,
      {.op = caller.op, .rank = caller.rank, .num_ranks = caller.num_ranks},
      reason);
  return reason.WithContext(caller.op);
}

StatusOr<Caller> FindCaller(const GpuContext& context,
                            const GpuExchange& exchange,
                            std::string_view name) {
  const std::string op =
      std::string(name) + " over axis " + std::string(exchange.axis);
  if (exchange.devices.size() != exchange.ranks.size() ||
      exchange.devices.size() != exchange.groups.size()) {
    return Internal(op + ": devices, ranks, groups: different lengths");
  }
  const auto* at = std::find(exchange.devices.begin(), exchange.devices.end(),
                             context.device);
  if (at == exchange.devices.end()) {
    return FailedPrecondition(
        op + ": runs on GPU " + std::to_string(context.device) +
        ", which is not in the mesh that it was compiled for");
  }
  const int64_t index = at - exchange.devices.begin();
  const int64_t num_ranks = std::count(
      exchange.groups.begin(), exchange.groups.end(), exchange.groups[index]);
  if (num_ranks > moe::cuda::kMaxRanks) {
    return Unimplemented(op + ": " + std::to_string(num_ranks) +
                         " GPUs in a group, at most " +
                         std::to_string(moe::cuda::kMaxRanks));
  }
  auto& meeting = moe::BlockingMeeting::Process();
  Caller caller;
  caller.op = op;
  caller.device = context.device;
  caller.rank = static_cast<int>(exchange.ranks[index]);
  caller.num_ranks = static_cast<int>(num_ranks);
  caller.key = {
      .run_id = context.run_id,
      .position = meeting.NextPosition(context.run_id, context.device),
      .group = exchange.groups[index]};
  caller.stream = context.stream;
  std::vector<int> devices(num_ranks);
  for (size_t i = 0; i < exchange.devices.size(); ++i) {
    if (exchange.groups[i] != exchange.groups[index]) continue;
    if (exchange.ranks[i] < 0 || exchange.ranks[i] >= num_ranks) {
      return Internal(op + ": ranks: not 0 .. " +
                      std::to_string(num_ranks - 1));
    }
    devices[exchange.ranks[i]] = static_cast<int>(exchange.devices[i]);
  }
  caller.wiring = moe::cuda::Wiring::Of(
      std::move(devices), static_cast<moe::Schedule>(exchange.schedule));
  caller.meeting = &meeting;
  return caller;
}

Status DispatchOnGpu(const GpuContext& context, const GpuExchange& exchange,
                     const AnyBuffer& tokens, const AnyBuffer& expert_ids,
                     const AnyBuffer& rows, const AnyBuffer& group_sizes,
                     const AnyBuffer& wanted, const AnyBuffer& slots,
                     const AnyBuffer* early) {
  const Attributes attributes = exchange.Named("dispatch");
  TB_ASSIGN_OR_RETURN(Caller caller,
                      FindCaller(context, exchange, attributes.op));
  moe::cuda::GpuDispatch call;
  const auto decode = [&]() -> StatusOr<int64_t> {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, caller.num_ranks,
                                                  tokens, expert_ids, rows));
    TB_RETURN_IF_ERROR(CheckPlan(sizes, group_sizes, wanted, slots));
    TB_RETURN_IF_ERROR(CheckWritableByPeers(caller, rows, "rows"));
    TB_ASSIGN_OR_RETURN(call.shape, ToShape(sizes, caller));
    // With one choice a token has at most one row: nothing to expand.
    call.is_deduplicated = call.shape.top_k > 1;
    TB_ASSIGN_OR_RETURN(call.scratch,
                        context.allocate(ScratchBytes(caller, call)));
    return sizes.config.num_batches;
  };
  return ForBatches(caller, decode(), [&](int64_t batch, int64_t num_batches) {
    call.tokens = Entry(tokens, batch, num_batches);
    call.expert_ids = Entry<int32_t>(expert_ids, batch, num_batches);
    call.rows = Entry(rows, batch, num_batches);
    call.group_sizes = Entry<int32_t>(group_sizes, batch, num_batches);
    call.wanted = Entry<int32_t>(wanted, batch, num_batches);
    call.slots = Entry<int32_t>(slots, batch, num_batches);
    if (early != nullptr && exchange.is_counted) {
      call.early = Entry(*early, batch, num_batches);
    }
    return RunDispatch(caller, call);
  });
}

Status CountOnGpu(const GpuContext& context, const GpuEarlyCount& count,
                  std::span<const AnyBuffer> expert_ids,
                  std::span<const AnyBuffer> slots) {
  const GpuExchange exchange = {.axis = count.axis,
                                .num_experts = count.num_experts,
                                .expert_capacity = count.expert_capacity,
                                .schedule = count.schedule,
                                .devices = count.devices,
                                .ranks = count.ranks,
                                .groups = count.groups};
  const Attributes attributes = exchange.Named("count of dispatches");
  TB_ASSIGN_OR_RETURN(Caller caller,
                      FindCaller(context, exchange, attributes.op));
  moe::cuda::GpuCount call;
  const auto decode = [&]() -> Status {
    for (size_t i = 0; i < expert_ids.size(); ++i) {
      TB_ASSIGN_OR_RETURN(
          Sizes sizes, DecodePlan(attributes, caller.num_ranks, expert_ids[i],
                                  count.num_rows));
      TB_RETURN_IF_ERROR(CheckShape(slots[i], "slots", sizes.Choices()));
      sizes.config.row_bytes = count.row_bytes;
      TB_ASSIGN_OR_RETURN(call.shape, ToShape(sizes, caller));
      call.parts.push_back({Entry<int32_t>(expert_ids[i], 0, 1),
                            Entry<int32_t>(slots[i], 0, 1)});
    }
    TB_ASSIGN_OR_RETURN(call.scratch,
                        context.allocate(ScratchBytes(caller, call)));
    return OkStatus();
  };
  if (const Status status = decode(); !status.ok()) {
    return TellOthers(caller, status);
  }
  return RunCount(caller, call);
}

Status CombineOnGpu(const GpuContext& context, const GpuExchange& exchange,
                    const AnyBuffer& rows, const AnyBuffer& expert_ids,
                    const AnyBuffer& slots, const AnyBuffer* weights,
                    const AnyBuffer& sums) {
  const Attributes attributes =
      exchange.Named(weights == nullptr ? "dispatch's gradient" : "combine");
  TB_ASSIGN_OR_RETURN(Caller caller,
                      FindCaller(context, exchange, attributes.op));
  moe::cuda::GpuCombine call;
  Tables tables;
  const auto decode = [&]() -> StatusOr<int64_t> {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, caller.num_ranks,
                                                  sums, expert_ids, rows));
    TB_ASSIGN_OR_RETURN(const moe::Element element, DecodeElement(rows));
    TB_RETURN_IF_ERROR(CheckSum(sizes, element, slots, weights));
    TB_ASSIGN_OR_RETURN(call.shape, ToShape(sizes, caller));
    call.dtype = ToDType(element);
    call.is_counted = exchange.is_counted;
    call.has_weights = weights != nullptr;
    TB_ASSIGN_OR_RETURN(
        tables, Tables::For(context, caller, expert_ids, slots, weights));
    TB_ASSIGN_OR_RETURN(call.scratch,
                        context.allocate(ScratchBytes(caller, call)));
    return sizes.config.num_batches;
  };
  return ForBatches(caller, decode(), [&](int64_t batch, int64_t num_batches) {
    call.rows = Entry(rows, batch, num_batches);
    call.expert_ids = Entry<int32_t>(tables.expert_ids, batch, num_batches);
    call.slots = Entry<int32_t>(tables.slots, batch, num_batches);
    call.weights = Entry(tables.weights, batch, num_batches);
    call.sums = Entry(sums, batch, num_batches);
    return RunCombine(caller, call);
  });
}

Status CombineGradOnGpu(const GpuContext& context, const GpuExchange& exchange,
                        const AnyBuffer& sum_grads, const AnyBuffer& rows,
                        const AnyBuffer& expert_ids, const AnyBuffer& slots,
                        const AnyBuffer& weights, const AnyBuffer& group_sizes,
                        const AnyBuffer& row_grads,
                        const AnyBuffer& weight_grads) {
  const Attributes attributes = exchange.Named("combine's gradient");
  TB_ASSIGN_OR_RETURN(Caller caller,
                      FindCaller(context, exchange, attributes.op));
  moe::cuda::GpuCombineGrad call;
  Tables tables;
  const auto decode = [&]() -> StatusOr<int64_t> {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, caller.num_ranks,
                                                  sum_grads, expert_ids, rows));
    TB_ASSIGN_OR_RETURN(const moe::Element element, DecodeElement(rows));
    TB_RETURN_IF_ERROR(CheckCombineGrad(sizes, element, rows, slots, weights,
                                        group_sizes, row_grads, weight_grads));
    TB_ASSIGN_OR_RETURN(call.shape, ToShape(sizes, caller));
    call.dtype = ToDType(element);
    call.is_counted = exchange.is_counted;
    TB_ASSIGN_OR_RETURN(
        tables, Tables::For(context, caller, expert_ids, slots, &weights));
    TB_RETURN_IF_ERROR(CheckWritableByPeers(caller, row_grads, "row_grads"));
    TB_RETURN_IF_ERROR(
        CheckWritableByPeers(caller, weight_grads, "weight_grads"));
    TB_ASSIGN_OR_RETURN(call.scratch,
                        context.allocate(ScratchBytes(caller, call)));
    return sizes.config.num_batches;
  };
  return ForBatches(caller, decode(), [&](int64_t batch, int64_t num_batches) {
    call.sum_grads = Entry(sum_grads, batch, num_batches);
    call.rows = Entry(rows, batch, num_batches);
    call.expert_ids = Entry<int32_t>(tables.expert_ids, batch, num_batches);
    call.slots = Entry<int32_t>(tables.slots, batch, num_batches);
    call.weights = Entry(tables.weights, batch, num_batches);
    call.group_sizes = Entry<int32_t>(group_sizes, batch, num_batches);
    call.row_grads = Entry(row_grads, batch, num_batches);
    call.weight_grads = Entry(weight_grads, batch, num_batches);
    if (!exchange.is_counted) {
      // Choices may have been masked since dispatch: then some rows are no
      // slot's any more, and nobody writes their gradients.
      const Status zeroed = moe::cuda::FromCuda(
          cudaMemsetAsync(
              call.row_grads, 0,
              static_cast<size_t>(row_grads.size_bytes()) / num_batches,
              context.stream),
          "zeroes of row gradients");
      if (!zeroed.ok()) return TellOthers(caller, zeroed);
    }
    return RunCombineGrad(caller, call);
  });
}

}  // namespace turbobus::ffi

#include "moe/cuda/gpu_exchange.h"

#include "moe/cuda/visit.h"

namespace turbobus::moe::cuda {

Status RunDispatch(const Caller& caller, const GpuDispatch& call) {
  const cudaStream_t stream = caller.stream;
  Visit visit(caller);
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchPlan(call.shape, call.expert_ids, call.counts,
                             call.block_offsets, stream),
                  "plan kernel"));
  TB_RETURN_IF_ERROR(visit.Meet({call.counts, call.rows, call.arrivals}));
  const SendArgs args = {
      .counts = visit.Addresses<const int32_t>(0),
      .arrivals = visit.Addresses<int32_t>(2),
      .rows = visit.Addresses<uint8_t>(1),
      .expert_ids = call.expert_ids,
      .block_offsets = call.block_offsets,
      .tokens = call.tokens,
      .positions = call.slots,
      .group_sizes = call.group_sizes,
      .wanted = call.wanted,
      .is_deduplicated = call.is_deduplicated,
  };
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchSend(call.shape, args, stream), "send kernel"));
  TB_RETURN_IF_ERROR(visit.Meet());
  if (!call.is_deduplicated) return OkStatus();
  return visit.Check(LaunchExpand(call.shape, call.arrivals, call.rows, stream),
                     "expand kernel");
}

Status RunCombine(const Caller& caller, const GpuCombine& call) {
  Visit visit(caller);
  TB_RETURN_IF_ERROR(
      visit.Meet({call.expert_ids, call.slots, call.weights, call.partials}));
  CombineArgs args = {
      .expert_ids = visit.Addresses<const int32_t>(0),
      .positions = visit.Addresses<const int32_t>(1),
      .weights = visit.Addresses<const void>(2),
      .rows = call.rows,
      .partials = visit.Addresses<uint8_t>(3),
      .out = call.sums,
  };
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchPartial(call.shape, call.dtype, args, caller.stream),
                  "partial-sum kernel"));
  TB_RETURN_IF_ERROR(visit.Meet());
  return visit.Check(LaunchSum(call.shape, call.dtype, args, caller.stream),
                     "sum kernel");
}

Status RunCombineGrad(const Caller& caller, const GpuCombineGrad& call) {
  Visit visit(caller);
  TB_RETURN_IF_ERROR(visit.Meet({call.expert_ids, call.slots, call.weights,
                                 call.row_grads, call.weight_grads}));
  const CombineGradArgs args = {
      .expert_ids = visit.Addresses<const int32_t>(0),
      .positions = visit.Addresses<const int32_t>(1),
      .weights = visit.Addresses<const void>(2),
      .out_grad = call.sum_grads,
      .rows = call.rows,
      .row_grads = visit.Addresses<uint8_t>(3),
      .weight_grads = visit.Addresses<void>(4),
      .group_sizes = call.group_sizes,
  };
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchGradSend(call.shape, call.dtype, args, caller.stream),
                  "gradient send kernel"));
  TB_RETURN_IF_ERROR(visit.Meet());
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchGradExpand(call.shape, call.dtype, args, caller.stream),
                  "gradient expand kernel"));
  return visit.Meet();
}

}  // namespace turbobus::moe::cuda

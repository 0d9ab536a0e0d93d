#include "moe/cuda/gpu_exchange.h"

#include "moe/cuda/cutter.h"
#include "moe/cuda/gpu_traffic.h"
#include "moe/cuda/packed_count.h"
#include "moe/cuda/packed_exchange.h"
#include "moe/cuda/visit.h"

namespace turbobus::moe::cuda {
namespace {

// The exchanges of ranks whose kernels write into each other's memory.

struct DispatchScratch {
  int32_t* counts = nullptr;         // [num_experts]
  int32_t* block_offsets = nullptr;  // PlanScratchBytes(shape)
  int32_t* arrivals = nullptr;       // [num_ranks, num_tokens, top_k]

  DispatchScratch(const Shape& shape, Cutter& cutter) {
    counts = cutter.Take<int32_t>(shape.num_experts);
    block_offsets = cutter.Take<int32_t>(PlanScratchBytes(shape) /
                                         static_cast<int64_t>(sizeof(int32_t)));
    arrivals = cutter.Take<int32_t>(static_cast<int64_t>(shape.num_ranks) *
                                    shape.num_tokens * shape.top_k);
  }
};

int64_t BoxBytes(const Shape& shape) {
  return shape.num_tokens * shape.row_bytes;
}

Status DirectDispatch(const Caller& caller, const GpuDispatch& call,
                      const Tally& tally) {
  const cudaStream_t stream = caller.stream;
  Cutter cutter(call.scratch);
  const DispatchScratch scratch(call.shape, cutter);
  Visit visit(caller);
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchPlan(call.shape, call.expert_ids, scratch.counts,
                             scratch.block_offsets, stream),
                  "plan kernel"));
  TB_RETURN_IF_ERROR(visit.Meet({scratch.counts, call.rows, scratch.arrivals}));
  const SendArgs args = {
      .counts = visit.Addresses<const int32_t>(0),
      .arrivals = visit.Addresses<int32_t>(2),
      .rows = visit.Addresses<uint8_t>(1),
      .expert_ids = call.expert_ids,
      .block_offsets = scratch.block_offsets,
      .tokens = call.tokens,
      .positions = call.slots,
      .group_sizes = call.group_sizes,
      .wanted = call.wanted,
      .is_deduplicated = call.is_deduplicated,
      .tally = tally,
  };
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchSend(call.shape, args, stream), "send kernel"));
  TB_RETURN_IF_ERROR(visit.MeetLast());
  if (!call.is_deduplicated) return OkStatus();
  return visit.Check(
      LaunchExpand(call.shape, scratch.arrivals, call.rows, stream),
      "expand kernel");
}

Status DirectCombine(const Caller& caller, const GpuCombine& call,
                     const Tally& tally) {
  const Shape& shape = call.shape;
  Visit visit(caller);
  TB_RETURN_IF_ERROR(
      visit.Meet({call.expert_ids, call.slots, call.weights, call.scratch}));
  CombineArgs args = {
      .expert_ids = visit.Addresses<const int32_t>(0),
      .positions = visit.Addresses<const int32_t>(1),
      .weights = visit.Addresses<const void>(2),
      .rows = call.rows,
      .outbox = {.of = visit.Addresses<uint8_t>(3)},
      .leaving = {},
      .inbox = {},
      .arrived = {},
      .out = call.sums,
      .tally = tally,
  };
  // Each rank's memory has a box for every rank.
  uint8_t* const own = args.outbox.of.of[shape.rank];
  for (int r = 0; r < shape.num_ranks; ++r) {
    args.inbox.of.of[r] = own + r * BoxBytes(shape);
    args.outbox.of.of[r] += shape.rank * BoxBytes(shape);
  }
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchPartial(shape, call.dtype, args, caller.stream),
                  "partial-sum kernel"));
  TB_RETURN_IF_ERROR(visit.MeetLast());
  return visit.Check(LaunchSum(shape, call.dtype, args, caller.stream),
                     "sum kernel");
}

Status DirectCombineGrad(const Caller& caller, const GpuCombineGrad& call,
                         const Tally& tally) {
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
      .has_boxes = false,
      .outbox = {},
      .inbox = {},
      .weight_grads = visit.Addresses<void>(4),
      .group_sizes = call.group_sizes,
      .tally = tally,
  };
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchGradSend(call.shape, call.dtype, args, caller.stream),
                  "gradient send kernel"));
  TB_RETURN_IF_ERROR(visit.Meet());
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchGradExpand(call.shape, call.dtype, args, caller.stream),
                  "gradient expand kernel"));
  return visit.MeetLast();
}

GpuTraffic::Kind DirectKind(const Caller& caller, GpuTraffic::Op op) {
  return {.op = op, .num_ranks = caller.num_ranks, .devices = {}};
}

}  // namespace

int64_t ScratchBytes(const Caller& caller, const GpuDispatch& call) {
  if (!caller.wiring.is_direct) return PackedScratchBytes(caller, call);
  Cutter cutter(nullptr);
  DispatchScratch(call.shape, cutter);
  return cutter.used_bytes();
}

int64_t ScratchBytes(const Caller& caller, const GpuCount& call) {
  return caller.wiring.is_direct ? 0 : PackedScratchBytes(caller, call);
}

int64_t ScratchBytes(const Caller& caller, const GpuCombine& call) {
  if (!caller.wiring.is_direct) return PackedScratchBytes(caller, call);
  return call.shape.num_ranks * BoxBytes(call.shape);
}

int64_t ScratchBytes(const Caller& caller, const GpuCombineGrad& call) {
  if (!caller.wiring.is_direct) return PackedScratchBytes(caller, call);
  return 0;
}

Status RunDispatch(const Caller& caller, const GpuDispatch& call) {
  if (!caller.wiring.is_direct) return PackedDispatch(caller, call);
  return GpuTraffic::Process().Count(
      caller, DirectKind(caller, GpuTraffic::Op::kDispatch),
      [&](const Tally& tally) { return DirectDispatch(caller, call, tally); });
}

Status RunCount(const Caller& caller, const GpuCount& call) {
  return caller.wiring.is_direct ? OkStatus() : PackedCount(caller, call);
}

Status RunCombine(const Caller& caller, const GpuCombine& call) {
  if (!caller.wiring.is_direct) return PackedCombine(caller, call);
  return GpuTraffic::Process().Count(
      caller,
      DirectKind(caller, call.has_weights ? GpuTraffic::Op::kCombine
                                          : GpuTraffic::Op::kDispatchGrad),
      [&](const Tally& tally) { return DirectCombine(caller, call, tally); });
}

Status RunCombineGrad(const Caller& caller, const GpuCombineGrad& call) {
  if (!caller.wiring.is_direct) return PackedCombineGrad(caller, call);
  return GpuTraffic::Process().Count(
      caller, DirectKind(caller, GpuTraffic::Op::kCombineGrad),
      [&](const Tally& tally) {
        return DirectCombineGrad(caller, call, tally);
      });
}

}  // namespace turbobus::moe::cuda

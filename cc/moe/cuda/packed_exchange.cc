#include "moe/cuda/packed_exchange.h"

#include <cstdint>

#include "moe/cuda/gpu_traffic.h"
#include "moe/cuda/packed_call.h"
#include "moe/cuda/packed_layout.h"

namespace turbobus::moe::cuda {

Status PackedCall::Dispatch(const GpuDispatch& call) {
  own_ = {call.expert_ids, call.slots, nullptr};
  TB_RETURN_IF_ERROR(Begin());
  // A step of a loop has its slots where the one before had them, and only rows
  // that go by rings are counted.
  Forget(call.slots);
  uint8_t* const mail = mail_->data();
  TB_RETURN_IF_ERROR(
      Check(LaunchPlan(shape_, call.expert_ids,
                       reinterpret_cast<int32_t*>(mail + layout_.counts),
                       scratch_.block_offsets, caller_.stream),
            "plan kernel"));
  TB_RETURN_IF_ERROR(SwapMail());
  PositionsArgs args = {
      .counts = InAll<const int32_t>(layout_.counts),
      .expert_ids = call.expert_ids,
      .block_offsets = scratch_.block_offsets,
      .positions = call.slots,
      .group_sizes = call.group_sizes,
      .wanted = call.wanted,
      .posted_ids = reinterpret_cast<int32_t*>(mail + layout_.ids),
      .posted_positions = reinterpret_cast<int32_t*>(mail + layout_.positions),
  };
  if (!layout_.is_mailed) {
    // Every block reads all counts: better once over the link.
    WordCopies copies;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      int32_t* const counts = scratch_.counts + r * shape_.num_experts;
      copies.Add(args.counts.of[r], counts, shape_.num_experts);
      args.counts.of[r] = counts;
    }
    TB_RETURN_IF_ERROR(
        Check(LaunchWordCopies(copies, caller_.stream), "counts kernel"));
  }
  TB_RETURN_IF_ERROR(
      Check(LaunchPositions(shape_, args, caller_.stream), "positions kernel"));
  if (layout_.is_mailed) return MailDispatch(call);
  return layout_.is_broadcast ? BroadcastDispatch(call) : RingDispatch(call);
}

Status PackedCall::Pack(const GpuDispatch& call, const Boxes& outbox,
                        bool for_peers, bool for_own) {
  const PackArgs args = {
      .tokens = call.tokens,
      .expert_ids = call.expert_ids,
      .positions = call.slots,
      .group_sizes = call.group_sizes,
      .rows = call.rows,
      .outbox = outbox,
      .for_peers = for_peers,
      .for_own = for_own,
      .tally = tally_,
      .broadcast_bytes = layout_.is_broadcast ? layout_.box_bytes() : 0,
  };
  return Check(LaunchPack(shape_, args, caller_.stream), "pack kernel");
}

Status PackedCall::Unpack(const GpuDispatch& call, const Boxes& inbox,
                          const Arrived& arrived) {
  const UnpackArgs args = {
      .expert_ids = Tables(layout_.ids, own_.expert_ids),
      .positions = Tables(layout_.positions, own_.positions),
      .inbox = inbox,
      .arrived = arrived,
      .rows = call.rows,
  };
  return Check(LaunchUnpack(shape_, args, caller_.stream), "unpack kernel");
}

Status PackedCall::MailDispatch(const GpuDispatch& call) {
  Boxes boxes = {.of = InAll<uint8_t>(layout_.rows)};
  const Boxes outbox = {.of = SameForAll(boxes.of.of[shape_.rank]),
                        .index = nullptr,
                        .is_shared = true};
  TB_RETURN_IF_ERROR(Pack(call, outbox, true, true));
  TB_RETURN_IF_ERROR(visit_.MeetLast());
  return Unpack(call, boxes);
}

Status PackedCall::BroadcastDispatch(const GpuDispatch& call) {
  TB_RETURN_IF_ERROR(visit_.Meet({scratch_.inbox}));
  TB_RETURN_IF_ERROR(PushTokens(call.tokens));
  TB_RETURN_IF_ERROR(ReadTables());
  TB_RETURN_IF_ERROR(Pack(call, {}, false, true));
  TB_RETURN_IF_ERROR(transfers_.End());
  Boxes inbox;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    inbox.of.of[r] =
        scratch_.inbox + layout_.InboxOf(shape_.rank, r) * shape_.row_bytes;
  }
  return Unpack(call, inbox);
}

Status PackedCall::RingDispatch(const GpuDispatch& call) {
  if (call.early != nullptr) TB_RETURN_IF_ERROR(RecallEarly(call.early));
  TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/true));
  TB_RETURN_IF_ERROR(
      Pack(call, Numbered(scratch_.outbox, scratch_.own_index), true, false));
  TB_RETURN_IF_ERROR(SwapTotals(scratch_.outbox));
  Remember(call.slots);
  TB_RETURN_IF_ERROR(PullRows(/*is_forward=*/true));
  TB_RETURN_IF_ERROR(ReadTables());
  TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/false));
  TB_RETURN_IF_ERROR(Pack(call, {}, false, true));
  const Boxes inbox = Numbered(scratch_.inbox, scratch_.peer_index);
  TB_RETURN_IF_ERROR(ForParts(
      [&](const Arrived& arrived) { return Unpack(call, inbox, arrived); }));
  return transfers_.End();
}

Status PackedCall::Combine(const GpuCombine& call) {
  own_ = {call.expert_ids, call.slots, call.weights};
  TB_RETURN_IF_ERROR(Begin());
  TB_RETURN_IF_ERROR(PostTables());
  if (!layout_.is_mailed) {
    if (call.is_counted) Recall(call.slots);
    TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/true));
  }
  TB_RETURN_IF_ERROR(SwapMail());
  TB_RETURN_IF_ERROR(ReadTables());
  CombineArgs args = {
      .expert_ids = Tables(layout_.ids, own_.expert_ids),
      .positions = Tables(layout_.positions, own_.positions),
      .weights = Weights(),
      .rows = call.rows,
      .outbox = Numbered(scratch_.outbox, scratch_.peer_index),
      .leaving = {},
      .inbox = Numbered(scratch_.inbox, scratch_.own_index),
      .arrived = {},
      .out = call.sums,
      .tally = tally_,
  };
  if (layout_.is_mailed) {
    args.inbox = {.of = InAll<uint8_t>(layout_.rows)};
    for (int r = 0; r < shape_.num_ranks; ++r) {
      args.outbox.of.of[r] =
          args.inbox.of.of[shape_.rank] + r * layout_.box_bytes();
    }
    for (int r = 0; r < shape_.num_ranks; ++r) {
      args.inbox.of.of[r] += shape_.rank * layout_.box_bytes();
    }
  } else {
    TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/false));
  }
  TB_RETURN_IF_ERROR(SumForPeers(call.dtype, args));
  const auto sum = [&](const Arrived& arrived) {
    args.arrived = arrived;
    return Check(LaunchSum(shape_, call.dtype, args, caller_.stream),
                 "sum kernel");
  };
  if (layout_.is_mailed) {
    TB_RETURN_IF_ERROR(visit_.MeetLast());
    return sum({});
  }
  TB_RETURN_IF_ERROR(SwapTotals(scratch_.outbox));
  TB_RETURN_IF_ERROR(PullRows(/*is_forward=*/false));
  TB_RETURN_IF_ERROR(ForParts(sum));
  return transfers_.End();
}

Status PackedCall::CombineGrad(const GpuCombineGrad& call) {
  own_ = {call.expert_ids, call.slots, call.weights};
  TB_RETURN_IF_ERROR(Begin());
  TB_RETURN_IF_ERROR(PostTables());
  CombineGradArgs args = {
      .expert_ids = {},
      .positions = {},
      .weights = {},
      .out_grad = call.sum_grads,
      .rows = call.rows,
      .row_grads = SameForAll(call.row_grads),
      .has_boxes = true,
      .outbox = Numbered(scratch_.outbox, scratch_.own_index),
      .inbox = Numbered(scratch_.inbox, scratch_.peer_index),
      .weight_grads = SameForAll(call.weight_grads),
      .group_sizes = call.group_sizes,
      .tally = tally_,
  };
  args.expert_ids.of[shape_.rank] = own_.expert_ids;
  args.positions.of[shape_.rank] = own_.positions;
  args.weights.of[shape_.rank] = own_.weights;
  const auto send = [&](bool for_peers, bool for_own) {
    args.for_peers = for_peers;
    args.for_own = for_own;
    return Check(LaunchGradSend(shape_, call.dtype, args, caller_.stream),
                 "gradient send kernel");
  };
  if (layout_.is_mailed) {
    if (!call.is_counted) Forget(call.slots);
    args.outbox = {.of = SameForAll(mail_->data() + layout_.rows),
                   .index = nullptr,
                   .is_shared = true};
    TB_RETURN_IF_ERROR(send(true, true));
    TB_RETURN_IF_ERROR(SwapMail());
    args.inbox = {.of = InAll<uint8_t>(layout_.rows)};
  } else {
    if (call.is_counted) Recall(call.slots);
    TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/true));
    TB_RETURN_IF_ERROR(send(true, false));
    TB_RETURN_IF_ERROR(SwapMail());
    TB_RETURN_IF_ERROR(SwapTotals(scratch_.outbox));
    Remember(call.slots);
    TB_RETURN_IF_ERROR(PullRows(/*is_forward=*/true));
    TB_RETURN_IF_ERROR(ReadTables());
    TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/false));
    TB_RETURN_IF_ERROR(send(false, true));
    TB_RETURN_IF_ERROR(transfers_.Await());
  }
  args.expert_ids = Tables(layout_.ids, own_.expert_ids);
  args.positions = Tables(layout_.positions, own_.positions);
  args.weights = Weights();
  // What this rank finds goes by mail; kernels write it there if it is little.
  uint8_t* const mailed_grads = mail_->data() + layout_.grads;
  uint8_t* const grads = layout_.is_mailed ? mailed_grads : scratch_.grads;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    args.weight_grads.of[r] = grads + r * layout_.grad_bytes();
  }
  if (!layout_.is_mailed) {
    // Slots without a row here stay zeros: all are copied.
    TB_RETURN_IF_ERROR(
        Check(cudaMemsetAsync(grads, 0, shape_.num_ranks * layout_.grad_bytes(),
                              caller_.stream),
              "zeroing of weight gradients"));
  }
  TB_RETURN_IF_ERROR(
      Check(LaunchGradExpand(shape_, call.dtype, args, caller_.stream),
            "gradient expand kernel"));
  if (layout_.is_mailed) {
    TB_RETURN_IF_ERROR(visit_.MeetLast());
  } else {
    TB_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(mailed_grads, grads,
                              shape_.num_ranks * layout_.grad_bytes(),
                              cudaMemcpyDefault, caller_.stream),
              "copy of weight gradients"));
    TB_RETURN_IF_ERROR(transfers_.End());
  }
  MergeArgs merge = {
      .expert_ids = own_.expert_ids,
      .positions = own_.positions,
      .found = {},
      .weight_grads = call.weight_grads,
  };
  for (int r = 0; r < shape_.num_ranks; ++r) {
    merge.found.of[r] = In<const uint8_t>(
        r, layout_.grads + shape_.rank * layout_.grad_bytes());
  }
  return Check(LaunchMerge(shape_, call.dtype, merge, caller_.stream),
               "merge kernel");
}

namespace {

int WeightWords(DType dtype, bool has_weights) {
  if (!has_weights) return 0;
  return dtype == DType::kF64 ? 2 : 1;
}

PackedLayout LayoutOf(const Caller& caller, const GpuDispatch& call) {
  return {PackedOp::kDispatch, call.shape, caller.wiring, 0};
}

PackedLayout LayoutOf(const Caller& caller, const GpuCombine& call) {
  return {PackedOp::kCombine, call.shape, caller.wiring,
          WeightWords(call.dtype, call.has_weights)};
}

PackedLayout LayoutOf(const Caller& caller, const GpuCombineGrad& call) {
  return {PackedOp::kCombineGrad, call.shape, caller.wiring,
          WeightWords(call.dtype, true)};
}

template <typename Call>
int64_t SizeOf(const Caller& caller, const Call& call) {
  return PackedScratch(LayoutOf(caller, call), nullptr).size_bytes;
}

/// What a call counts as: the schedule that it runs, which is not always the
/// one that was asked for.
GpuTraffic::Kind KindOf(const Caller& caller, const PackedLayout& layout,
                        GpuTraffic::Op op) {
  GpuTraffic::Kind kind = {.op = op,
                           .schedule = Schedule::kPacked,
                           .means = GpuTraffic::Means::kMail,
                           .num_ranks = caller.num_ranks,
                           .devices = {}};
  if (layout.is_mailed) return kind;
  kind.means = GpuTraffic::Means::kRings;
  if (layout.is_broadcast) {
    kind.schedule = Schedule::kBroadcast;
    return kind;
  }
  kind.devices = caller.wiring.devices;
  kind.has_relays = caller.wiring.has_relays;
  if (kind.has_relays) kind.schedule = Schedule::kRelay;
  return kind;
}

/// Runs a rank's call, counted.
template <typename Call>
Status Count(const Caller& caller, const Call& call, GpuTraffic::Op op,
             Status (PackedCall::*run)(const Call&)) {
  const PackedLayout layout = LayoutOf(caller, call);
  return GpuTraffic::Process().Count(
      caller, KindOf(caller, layout, op), [&](const Tally& tally) {
        return (PackedCall(caller, layout, call.scratch, tally).*run)(call);
      });
}

}  // namespace

int64_t PackedScratchBytes(const Caller& caller, const GpuDispatch& call) {
  return SizeOf(caller, call);
}

int64_t PackedScratchBytes(const Caller& caller, const GpuCombine& call) {
  return SizeOf(caller, call);
}

int64_t PackedScratchBytes(const Caller& caller, const GpuCombineGrad& call) {
  return SizeOf(caller, call);
}

Status PackedDispatch(const Caller& caller, const GpuDispatch& call) {
  return Count(caller, call, GpuTraffic::Op::kDispatch, &PackedCall::Dispatch);
}

Status PackedCombine(const Caller& caller, const GpuCombine& call) {
  return Count(caller, call,
               call.has_weights ? GpuTraffic::Op::kCombine
                                : GpuTraffic::Op::kDispatchGrad,
               &PackedCall::Combine);
}

Status PackedCombineGrad(const Caller& caller, const GpuCombineGrad& call) {
  return Count(caller, call, GpuTraffic::Op::kCombineGrad,
               &PackedCall::CombineGrad);
}

}  // namespace turbobus::moe::cuda

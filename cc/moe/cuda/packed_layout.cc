#include "moe/cuda/packed_layout.h"

#include <algorithm>

#include "moe/cuda/cutter.h"

namespace turbobus::moe::cuda {
namespace {

constexpr int64_t kWordBytes = sizeof(int32_t);
constexpr int64_t kAlignment = 256;

/// Rows that a rank's tokens have on all peers, one for each token and peer.
int64_t MostOutgoing(const Shape& shape) {
  return static_cast<int64_t>(shape.num_tokens) *
         std::min(shape.top_k, shape.num_ranks - 1);
}

int64_t MostIncoming(const Shape& shape) {
  return static_cast<int64_t>(shape.num_tokens) * (shape.num_ranks - 1);
}

}  // namespace

PackedLayout::PackedLayout(PackedOp op, const Shape& shape,
                           const Wiring& wiring, int weight_words)
    : shape(shape), op(op), weight_words(weight_words) {
  is_mailed = box_bytes() <= wiring.most_mailed_bytes;
  is_broadcast = !is_mailed && wiring.is_broadcast && op == PackedOp::kDispatch;

  int64_t end = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = end;
    end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return begin;
  };
  counts = take(shape.num_experts * kWordBytes);
  totals = take(shape.num_ranks * kWordBytes);
  table_bytes = num_slots() * (2 + weight_words) * kWordBytes;
  ids = take(table_bytes);
  positions = ids + num_slots() * kWordBytes;
  weights = positions + num_slots() * kWordBytes;
  const bool has_grads = op == PackedOp::kCombineGrad;
  grads = take(has_grads ? shape.num_ranks * grad_bytes() : 0);
  const int64_t num_boxes = op == PackedOp::kCombine ? shape.num_ranks : 1;
  rows = take(is_mailed ? num_boxes * box_bytes() : 0);
  mail_bytes = end;

  outbox_rows = 0;
  inbox_rows = 0;
  if (is_mailed) return;
  switch (op) {
    case PackedOp::kDispatch:
      // A row of the result is one token's. (Slots that a combine reads are
      // data: any number of tokens may name a row.)
      outbox_rows = is_broadcast ? 0 : MostOutgoing(shape);
      inbox_rows = is_broadcast ? MostIncoming(shape)
                                : std::min(MostIncoming(shape), shape.num_rows);
      break;
    case PackedOp::kCombine:
      outbox_rows = MostIncoming(shape);
      inbox_rows = MostOutgoing(shape);
      break;
    case PackedOp::kCombineGrad:
      outbox_rows = MostOutgoing(shape);
      inbox_rows = MostIncoming(shape);
      break;
  }
}

PackedScratch::PackedScratch(const PackedLayout& layout, void* memory) {
  const Shape& shape = layout.shape;
  Cutter cutter(memory);
  if (layout.op == PackedOp::kDispatch) {
    block_offsets = cutter.Take<int32_t>(PlanScratchBytes(shape) / kWordBytes);
  }
  if (!layout.is_mailed) {
    const int64_t index_size =
        static_cast<int64_t>(shape.num_ranks) * shape.num_tokens;
    if (layout.op == PackedOp::kDispatch) {
      counts = cutter.Take<int32_t>(static_cast<int64_t>(shape.num_ranks) *
                                    shape.num_experts);
    }
    tables = cutter.Take<uint8_t>(shape.num_ranks * layout.table_bytes);
    if (!layout.is_broadcast) {
      own_index = cutter.Take<int32_t>(index_size);
      peer_index = cutter.Take<int32_t>(index_size);
      number_blocks =
          cutter.Take<int32_t>(NumberScratchBytes(shape) / kWordBytes);
      peer_totals = cutter.Take<int32_t>(shape.num_ranks);
    }
    outbox = cutter.Take<uint8_t>(layout.outbox_rows * shape.row_bytes);
    inbox = cutter.Take<uint8_t>(layout.inbox_rows * shape.row_bytes);
    if (layout.op == PackedOp::kCombineGrad) {
      grads = cutter.Take<uint8_t>(shape.num_ranks * layout.grad_bytes());
    }
  }
  size_bytes = cutter.used_bytes();
}

}  // namespace turbobus::moe::cuda

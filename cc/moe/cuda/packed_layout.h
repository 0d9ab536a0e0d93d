#ifndef TURBOBUS_MOE_CUDA_PACKED_LAYOUT_H_
#define TURBOBUS_MOE_CUDA_PACKED_LAYOUT_H_

#include <cstdint>

#include "moe/cuda/kernels.h"
#include "moe/cuda/wiring.h"

namespace turbobus::moe::cuda {

enum class PackedOp { kDispatch, kCombine, kCombineGrad };

/// What lies where in the mail and in the device memory of a packed exchange.
/// The same on all ranks of a call.
struct PackedLayout {
  /// `weight_words`: 32-bit words of a choice's weight; 0: there are none.
  PackedLayout(PackedOp op, const Shape& shape, const Wiring& wiring,
               int weight_words);

  Shape shape;
  PackedOp op;
  int weight_words;
  bool is_mailed;     // Rows go by mail.
  bool is_broadcast;  // Else by rings, of which one has all peers as readers.

  // Places in mail, in bytes.
  int64_t counts;  // s32[num_experts]
  int64_t totals;  // s32[num_ranks]: rows packed for each peer.
  // The tables, s32[num_tokens, top_k] each (or words), one behind the other.
  int64_t ids;
  int64_t positions;
  int64_t weights;
  int64_t table_bytes;
  int64_t grads;  // [num_ranks, num_tokens, top_k]: of their weights.
  /// Mailed rows by token: of a combine [num_ranks, num_tokens, row], else
  /// [num_tokens, row] for all peers.
  int64_t rows;
  int64_t mail_bytes;

  // Rows on the device.
  int64_t outbox_rows;
  int64_t inbox_rows;

  int64_t first_table() const { return ids; }
  int64_t num_slots() const {
    return static_cast<int64_t>(shape.num_tokens) * shape.top_k;
  }
  int64_t grad_bytes() const { return num_slots() * weight_words * 4; }
  int64_t box_bytes() const { return shape.num_tokens * shape.row_bytes; }
  /// The first row of a source's tokens in a reader's inbox of a broadcast.
  int64_t InboxOf(int reader, int source) const {
    return static_cast<int64_t>(source > reader ? source - 1 : source) *
           shape.num_tokens;
  }
};

/// Device memory of one call.
struct PackedScratch {
  PackedScratch(const PackedLayout& layout, void* memory);

  int32_t* block_offsets = nullptr;  // Of the plan.
  int32_t* counts = nullptr;         // [num_ranks, num_experts]
  uint8_t* tables = nullptr;         // [num_ranks, table_bytes]: the peers'.
  // Numbers of this rank's tokens and of the peers': `Boxes::index`.
  int32_t* own_index = nullptr;
  int32_t* peer_index = nullptr;
  int32_t* number_blocks = nullptr;
  int32_t* peer_totals = nullptr;
  uint8_t* outbox = nullptr;
  uint8_t* inbox = nullptr;
  uint8_t* grads = nullptr;  // As `PackedLayout::grads`.
  int64_t size_bytes = 0;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_PACKED_LAYOUT_H_

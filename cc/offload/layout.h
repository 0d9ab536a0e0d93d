#ifndef TURBOBUS_OFFLOAD_LAYOUT_H_
#define TURBOBUS_OFFLOAD_LAYOUT_H_

#include <cstdint>
#include <span>

#include "base/status.h"

namespace turbobus::offload {

/// Bytes that XLA allocates for `num_elements` of `element_bits` bits each.
/// Elements below a byte are packed: two int4 share one. Fails with
/// INVALID_ARGUMENT on negative numbers or where the size overflows.
StatusOr<int64_t> PackedSizeBytes(int64_t num_elements, int element_bits);

/// One row of a dense, major-to-minor stack along one of its axes: `num_pieces`
/// runs of `piece_bytes`, `stride_bytes` apart, the first `offset_bytes` into
/// the stack. In the row itself the pieces lie one after another. A row along
/// axis 0 is one piece.
struct RowSlice {
  int64_t offset_bytes = 0;
  int64_t num_pieces = 0;
  int64_t piece_bytes = 0;
  int64_t stride_bytes = 0;

  int64_t size_bytes() const { return num_pieces * piece_bytes; }
};

/// Row `index` of a stack of shape `dims` along `axis`; the index is clamped to
/// the axis, as `jax.lax.dynamic_index_in_dim` does.
///
/// INVALID_ARGUMENT: no such axis, an axis of length zero, or rows that do not
/// start and end on a byte (an odd number of int4, say).
StatusOr<RowSlice> SliceRow(std::span<const int64_t> dims, int64_t axis,
                            int64_t index, int element_bits);

}  // namespace turbobus::offload

#endif  // TURBOBUS_OFFLOAD_LAYOUT_H_

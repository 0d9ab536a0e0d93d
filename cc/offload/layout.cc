#include "offload/layout.h"

#include <algorithm>
#include <limits>
#include <string>

namespace turbobus::offload {
namespace {

/// a * b, or -1 where that is no int64_t.
int64_t Multiply(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? -1 : product;
}

}  // namespace

StatusOr<int64_t> PackedSizeBytes(int64_t num_elements, int element_bits) {
  if (num_elements < 0 || element_bits <= 0) {
    return InvalidArgument(std::to_string(num_elements) + " elements of " +
                           std::to_string(element_bits) +
                           " bits: expected at least 0 and at least 1");
  }
  if (element_bits % 8 == 0) {
    const int64_t size = Multiply(num_elements, element_bits / 8);
    if (size >= 0) return size;
  } else {
    const int64_t bits = Multiply(num_elements, element_bits);
    if (bits >= 0 && bits <= std::numeric_limits<int64_t>::max() - 7) {
      return (bits + 7) / 8;
    }
  }
  return InvalidArgument(std::to_string(num_elements) + " elements of " +
                         std::to_string(element_bits) +
                         " bits: more bytes than an int64 counts");
}

StatusOr<RowSlice> SliceRow(std::span<const int64_t> dims, int64_t axis,
                            int64_t index, int element_bits) {
  if (axis < 0 || axis >= static_cast<int64_t>(dims.size())) {
    return InvalidArgument("axis " + std::to_string(axis) +
                           " of a stack with " + std::to_string(dims.size()) +
                           " dimensions");
  }
  const int64_t length = dims[axis];
  if (length <= 0) {
    return InvalidArgument("the stack has no rows along axis " +
                           std::to_string(axis));
  }
  int64_t num_pieces = 1;
  for (int64_t d = 0; d < axis; ++d) num_pieces = Multiply(num_pieces, dims[d]);
  int64_t inner = 1;
  for (size_t d = axis + 1; d < dims.size(); ++d)
    inner = Multiply(inner, dims[d]);
  const int64_t piece_bits = Multiply(inner, element_bits);
  if (num_pieces < 0 || piece_bits < 0 ||
      Multiply(Multiply(num_pieces, length), piece_bits) < 0) {
    return InvalidArgument("the stack has more bytes than an int64 counts");
  }
  if (piece_bits % 8 != 0) {
    return InvalidArgument("rows of " + std::to_string(inner) +
                           " elements of " + std::to_string(element_bits) +
                           " bits do not end on a byte");
  }
  const int64_t piece_bytes = piece_bits / 8;
  return RowSlice{
      .offset_bytes = std::clamp<int64_t>(index, 0, length - 1) * piece_bytes,
      .num_pieces = num_pieces,
      .piece_bytes = piece_bytes,
      .stride_bytes = length * piece_bytes};
}

}  // namespace turbobus::offload

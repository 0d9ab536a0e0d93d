#include "ffi/offload_buffer.h"

#include <algorithm>
#include <span>
#include <vector>

namespace turbobus::ffi {

using xla::ffi::AnyBuffer;
using xla::ffi::DataType;

int ElementBits(DataType type) {
  switch (type) {
    case DataType::S1:
    case DataType::U1:
      return 1;
    case DataType::S2:
    case DataType::U2:
      return 2;
    case DataType::S4:
    case DataType::U4:
    case DataType::F4E2M1FN:
      return 4;
    case DataType::PRED:
    case DataType::S8:
    case DataType::U8:
    case DataType::F8E5M2:
    case DataType::F8E4M3:
    case DataType::F8E4M3FN:
    case DataType::F8E4M3B11FNUZ:
    case DataType::F8E5M2FNUZ:
    case DataType::F8E4M3FNUZ:
    case DataType::F8E3M4:
    case DataType::F8E8M0FNU:
      return 8;
    case DataType::S16:
    case DataType::U16:
    case DataType::F16:
    case DataType::BF16:
      return 16;
    case DataType::S32:
    case DataType::U32:
    case DataType::F32:
      return 32;
    case DataType::S64:
    case DataType::U64:
    case DataType::F64:
    case DataType::C64:
      return 64;
    case DataType::C128:
      return 128;
    default:
      return 0;
  }
}

std::string Describe(AnyBuffer buffer) {
  std::string text =
      "type " + std::to_string(static_cast<int>(buffer.element_type())) + " (" +
      std::to_string(ElementBits(buffer.element_type())) + " bits), shape [";
  std::string_view comma;
  for (const int64_t dim : buffer.dimensions()) {
    text.append(comma).append(std::to_string(dim));
    comma = ",";
  }
  return text + "]";
}

StatusOr<int64_t> SizeBytes(AnyBuffer buffer) {
  const int bits = ElementBits(buffer.element_type());
  if (bits == 0) {
    return InvalidArgument("no transfer of this element type: " +
                           Describe(buffer));
  }
  return offload::PackedSizeBytes(static_cast<int64_t>(buffer.element_count()),
                                  bits);
}

Status CheckSameType(std::string_view call, std::string_view name_a,
                     AnyBuffer a, std::string_view name_b, AnyBuffer b) {
  if (a.element_type() == b.element_type() &&
      std::ranges::equal(a.dimensions(), b.dimensions())) {
    return OkStatus();
  }
  return InvalidArgument(std::string(call) + ": " + std::string(name_a) +
                         " has " + Describe(a) + ", " + std::string(name_b) +
                         " has " + Describe(b) + "; expected the same");
}

StatusOr<offload::RowSlice> CheckRow(std::string_view call, AnyBuffer stack,
                                     int64_t index, int64_t axis,
                                     AnyBuffer row) {
  const int bits = ElementBits(stack.element_type());
  const std::vector<int64_t> dims(stack.dimensions().begin(),
                                  stack.dimensions().end());
  auto slice = offload::SliceRow(dims, axis, index, bits);
  if (!slice.ok()) return slice.status().WithContext(call);
  TB_ASSIGN_OR_RETURN(const int64_t row_bytes, SizeBytes(row));
  if (stack.element_type() != row.element_type() ||
      slice->size_bytes() != row_bytes) {
    return InvalidArgument(std::string(call) + ": the row has " +
                           Describe(row) + ", which is no row along axis " +
                           std::to_string(axis) + " of the stack, " +
                           Describe(stack));
  }
  return *slice;
}

Status CheckIndex(std::string_view call, AnyBuffer index) {
  if (index.element_type() == DataType::S32 && index.element_count() == 1) {
    return OkStatus();
  }
  return InvalidArgument(std::string(call) + ": the index has " +
                         Describe(index) + "; expected one int32");
}

}  // namespace turbobus::ffi

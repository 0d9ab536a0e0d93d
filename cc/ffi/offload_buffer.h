#ifndef TURBOBUS_FFI_OFFLOAD_BUFFER_H_
#define TURBOBUS_FFI_OFFLOAD_BUFFER_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "offload/layout.h"
#include "xla/ffi/api/ffi.h"

namespace turbobus::ffi {

/// Bits of an element in XLA's buffers (4 for int4: two of them share a byte),
/// or 0 for a type that carries no bytes or that this library does not know.
int ElementBits(xla::ffi::DataType type);

/// Bytes that XLA allocated for `buffer`. `AnyBuffer::size_bytes()` counts a
/// whole byte for types below one, which is more than there is: never use it.
StatusOr<int64_t> SizeBytes(xla::ffi::AnyBuffer buffer);

/// "f32[4,8]"-like, for messages.
std::string Describe(xla::ffi::AnyBuffer buffer);

/// OK if both have one shape and element type; else INVALID_ARGUMENT naming
/// `call` and both operands.
Status CheckSameType(std::string_view call, std::string_view name_a,
                     xla::ffi::AnyBuffer a, std::string_view name_b,
                     xla::ffi::AnyBuffer b);

/// Where row `index` lies in `stack` along `axis`, checked against `row`.
StatusOr<offload::RowSlice> CheckRow(std::string_view call,
                                     xla::ffi::AnyBuffer stack, int64_t index,
                                     int64_t axis, xla::ffi::AnyBuffer row);

/// OK if `index` is one int32.
Status CheckIndex(std::string_view call, xla::ffi::AnyBuffer index);

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_OFFLOAD_BUFFER_H_

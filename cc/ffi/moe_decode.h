#ifndef TURBOBUS_FFI_MOE_DECODE_H_
#define TURBOBUS_FFI_MOE_DECODE_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "moe/exchange.h"
#include "moe/rows.h"
#include "xla/ffi/api/ffi.h"

// Operands and attributes of the exchange handlers, the same on CPU devices and
// GPUs. Shapes carry leading batch axes, all the same: what vmap added.

namespace turbobus::ffi {

/// The attributes that every exchange has.
struct Attributes {
  std::string_view op;
  std::string_view axis;
  int64_t num_experts = 0;
  int64_t expert_capacity = 0;
  int64_t schedule = 0;
};

/// Shapes of all operands, from those of a rank's tokens, ids and rows.
struct Sizes {
  moe::ExchangeConfig config;
  std::vector<int64_t> batch;  // Leading axes.
  int64_t hidden = 0;

  std::vector<int64_t> Shape(std::vector<int64_t> inner) const {
    std::vector<int64_t> shape = batch;
    shape.insert(shape.end(), inner.begin(), inner.end());
    return shape;
  }
  std::vector<int64_t> Tokens() const {
    return Shape({config.shape.num_tokens, hidden});
  }
  std::vector<int64_t> Choices() const {
    return Shape({config.shape.num_tokens, config.shape.top_k});
  }
  std::vector<int64_t> Rows() const {
    return Shape({config.shape.recv_capacity, hidden});
  }
  std::vector<int64_t> LocalExperts() const {
    return Shape({config.shape.num_local_experts()});
  }
};

/// Reads the sizes that need no rows: `hidden` and `config.row_bytes` stay 0.
StatusOr<Sizes> DecodePlan(const Attributes& attributes, int num_ranks,
                           const xla::ffi::AnyBuffer& expert_ids,
                           int64_t num_rows);

/// Reads the sizes off the operands that every exchange has; INVALID_ARGUMENT
/// names the one that does not fit.
StatusOr<Sizes> Decode(const Attributes& attributes, int num_ranks,
                       const xla::ffi::AnyBuffer& tokens,
                       const xla::ffi::AnyBuffer& expert_ids,
                       const xla::ffi::AnyBuffer& rows);

Status CheckShape(const xla::ffi::AnyBuffer& buffer, std::string_view name,
                  const std::vector<int64_t>& expected);
Status CheckType(const xla::ffi::AnyBuffer& buffer, std::string_view name,
                 xla::ffi::DataType expected);

/// The dtypes that rows are added up in.
StatusOr<moe::Element> DecodeElement(const xla::ffi::AnyBuffer& rows);
xla::ffi::DataType WeightType(moe::Element element);

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_MOE_DECODE_H_

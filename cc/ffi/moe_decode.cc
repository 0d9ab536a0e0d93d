#include "ffi/moe_decode.h"

#include <limits>
#include <string>

namespace turbobus::ffi {

using xla::ffi::AnyBuffer;

Status CheckShape(const AnyBuffer& buffer, std::string_view name,
                  const std::vector<int64_t>& expected) {
  const auto dims = buffer.dimensions();
  if (std::vector<int64_t>(dims.begin(), dims.end()) == expected) {
    return OkStatus();
  }
  const auto text = [](const auto& dims) {
    std::string list = "[";
    for (int64_t d : dims) {
      if (list.size() > 1) list += ", ";
      list += std::to_string(d);
    }
    list += "]";
    return list;
  };
  return InvalidArgument(std::string(name) + ": expected shape " +
                         text(expected) + ", got " + text(dims));
}

Status CheckType(const AnyBuffer& buffer, std::string_view name,
                 xla::ffi::DataType expected) {
  if (buffer.element_type() == expected) return OkStatus();
  return InvalidArgument(
      std::string(name) + ": expected XLA type " +
      std::to_string(static_cast<int>(expected)) + ", got " +
      std::to_string(static_cast<int>(buffer.element_type())));
}

StatusOr<Sizes> DecodePlan(const Attributes& attributes, int num_ranks,
                           const AnyBuffer& expert_ids, int64_t num_rows) {
  const auto ids = expert_ids.dimensions();
  if (ids.size() < 2) return InvalidArgument("expert_ids: expected rank >= 2");
  if (attributes.num_experts < 1 || attributes.num_experts % num_ranks != 0 ||
      attributes.num_experts > std::numeric_limits<int32_t>::max() ||
      attributes.expert_capacity < 0 || attributes.schedule < 0 ||
      attributes.schedule >= moe::kNumSchedules) {
    return InvalidArgument("num_experts, expert_capacity or schedule: " +
                           std::to_string(attributes.num_experts) + ", " +
                           std::to_string(attributes.expert_capacity) + ", " +
                           std::to_string(attributes.schedule));
  }
  Sizes sizes;
  sizes.batch.assign(ids.begin(), ids.end() - 2);
  moe::ExchangeConfig& config = sizes.config;
  moe::ExchangeShape& shape = config.shape;
  for (int64_t d : sizes.batch) config.num_batches *= d;
  shape.num_ranks = num_ranks;
  shape.num_experts = static_cast<int>(attributes.num_experts);
  shape.num_tokens = ids[ids.size() - 2];
  shape.top_k = static_cast<int>(ids.back());
  shape.recv_capacity = num_rows;
  shape.expert_capacity = attributes.expert_capacity;
  if (num_rows < 0 || num_rows > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("rows: expected 0 to 2^31 - 1 of them");
  }
  if (shape.is_padded() && shape.expert_capacity * shape.num_local_experts() !=
                               shape.recv_capacity) {
    return InvalidArgument("rows: not expert_capacity for each local expert");
  }
  config.schedule = static_cast<moe::Schedule>(attributes.schedule);
  TB_RETURN_IF_ERROR(CheckShape(expert_ids, "expert_ids", sizes.Choices()));
  TB_RETURN_IF_ERROR(CheckType(expert_ids, "expert_ids", xla::ffi::S32));
  return sizes;
}

StatusOr<Sizes> Decode(const Attributes& attributes, int num_ranks,
                       const AnyBuffer& tokens, const AnyBuffer& expert_ids,
                       const AnyBuffer& rows) {
  const auto row = rows.dimensions();
  if (row.size() < 2 || row.size() != expert_ids.dimensions().size()) {
    return InvalidArgument("expert_ids, rows: expected ranks >= 2, the same");
  }
  TB_ASSIGN_OR_RETURN(Sizes sizes, DecodePlan(attributes, num_ranks, expert_ids,
                                              row[row.size() - 2]));
  sizes.hidden = row.back();
  sizes.config.row_bytes =
      sizes.hidden *
      static_cast<int64_t>(xla::ffi::ByteWidth(rows.element_type()));
  TB_RETURN_IF_ERROR(CheckShape(tokens, "tokens", sizes.Tokens()));
  TB_RETURN_IF_ERROR(CheckType(tokens, "tokens", rows.element_type()));
  TB_RETURN_IF_ERROR(CheckShape(rows, "rows", sizes.Rows()));
  return sizes;
}

StatusOr<moe::Element> DecodeElement(const AnyBuffer& rows) {
  switch (rows.element_type()) {
    case xla::ffi::F32:
      return moe::Element::kF32;
    case xla::ffi::F64:
      return moe::Element::kF64;
    case xla::ffi::BF16:
      return moe::Element::kBF16;
    case xla::ffi::F16:
      return moe::Element::kF16;
    default:
      return InvalidArgument(
          "rows: expected float32, float64, bfloat16 or "
          "float16");
  }
}

xla::ffi::DataType WeightType(moe::Element element) {
  return element == moe::Element::kF64 ? xla::ffi::F64 : xla::ffi::F32;
}

}  // namespace turbobus::ffi

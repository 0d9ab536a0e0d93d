#include "ffi/moe_checks.h"

#include <cstdint>
#include <string_view>
#include <vector>

namespace turbobus::ffi {
namespace {

using xla::ffi::AnyBuffer;

Status Check(const AnyBuffer& buffer, std::string_view name,
             const std::vector<int64_t>& shape, xla::ffi::DataType type) {
  TB_RETURN_IF_ERROR(CheckShape(buffer, name, shape));
  return CheckType(buffer, name, type);
}

}  // namespace

Status CheckPlan(const Sizes& sizes, const AnyBuffer& group_sizes,
                 const AnyBuffer& wanted, const AnyBuffer& slots) {
  const std::vector<int64_t> experts = sizes.LocalExperts();
  TB_RETURN_IF_ERROR(Check(group_sizes, "group_sizes", experts, xla::ffi::S32));
  TB_RETURN_IF_ERROR(Check(wanted, "wanted", experts, xla::ffi::S32));
  return Check(slots, "slots", sizes.Choices(), xla::ffi::S32);
}

Status CheckSum(const Sizes& sizes, moe::Element element,
                const AnyBuffer& slots, const AnyBuffer* weights) {
  TB_RETURN_IF_ERROR(CheckShape(slots, "slots", sizes.Choices()));
  const bool is_transpose = weights == nullptr;
  if (!is_transpose || slots.element_type() != xla::ffi::F32) {
    TB_RETURN_IF_ERROR(CheckType(slots, "slots", xla::ffi::S32));
  }
  if (is_transpose) return OkStatus();
  return Check(*weights, "weights", sizes.Choices(), WeightType(element));
}

Status CheckCombineGrad(const Sizes& sizes, moe::Element element,
                        const AnyBuffer& rows, const AnyBuffer& slots,
                        const AnyBuffer& weights, const AnyBuffer& group_sizes,
                        const AnyBuffer& row_grads,
                        const AnyBuffer& weight_grads) {
  TB_RETURN_IF_ERROR(CheckSum(sizes, element, slots, &weights));
  TB_RETURN_IF_ERROR(Check(weight_grads, "weight_grads", sizes.Choices(),
                           WeightType(element)));
  TB_RETURN_IF_ERROR(
      Check(group_sizes, "group_sizes", sizes.LocalExperts(), xla::ffi::S32));
  return Check(row_grads, "row_grads", sizes.Rows(), rows.element_type());
}

}  // namespace turbobus::ffi

#ifndef TURBOBUS_FFI_MOE_CHECKS_H_
#define TURBOBUS_FFI_MOE_CHECKS_H_

#include "base/status.h"
#include "ffi/moe_decode.h"
#include "moe/rows.h"
#include "xla/ffi/api/ffi.h"

// Whether the buffers of an exchange have the shapes and dtypes that follow
// from its sizes; the same on CPU devices and GPUs. `Decode` has looked at
// those that the sizes come from. INVALID_ARGUMENT names the first that is
// wrong.

namespace turbobus::ffi {

/// What a dispatch plans.
Status CheckPlan(const Sizes& sizes, const xla::ffi::AnyBuffer& group_sizes,
                 const xla::ffi::AnyBuffer& wanted,
                 const xla::ffi::AnyBuffer& slots);

/// What says which rows are added up, and how. Null `weights`: the transpose of
/// dispatch, whose slots may also come as the bits of float32 (a gradient hands
/// them on so: jax_turbobus/moe/_halves.py).
Status CheckSum(const Sizes& sizes, moe::Element element,
                const xla::ffi::AnyBuffer& slots,
                const xla::ffi::AnyBuffer* weights);

/// What a combine's gradient has beside `sum_grads`, rows and ids.
Status CheckCombineGrad(const Sizes& sizes, moe::Element element,
                        const xla::ffi::AnyBuffer& rows,
                        const xla::ffi::AnyBuffer& slots,
                        const xla::ffi::AnyBuffer& weights,
                        const xla::ffi::AnyBuffer& group_sizes,
                        const xla::ffi::AnyBuffer& row_grads,
                        const xla::ffi::AnyBuffer& weight_grads);

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_MOE_CHECKS_H_

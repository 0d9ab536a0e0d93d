#ifndef TURBOBUS_FFI_MOE_OPERANDS_H_
#define TURBOBUS_FFI_MOE_OPERANDS_H_

#include <utility>

#include "xla/ffi/api/ffi.h"

// The operands and results of the exchange handlers, bound behind what only CPU
// devices or only GPUs have (docs/ffi.md).

namespace turbobus::ffi {

template <typename Binding>
auto BindDispatch(Binding binding) {
  return std::move(binding)
      .template Arg<xla::ffi::AnyBuffer>()   // tokens
      .template Arg<xla::ffi::AnyBuffer>()   // expert_ids
      .template Ret<xla::ffi::AnyBuffer>()   // rows
      .template Ret<xla::ffi::AnyBuffer>()   // group_sizes
      .template Ret<xla::ffi::AnyBuffer>()   // wanted
      .template Ret<xla::ffi::AnyBuffer>();  // slots
}

template <typename Binding>
auto BindCombine(Binding binding) {
  return std::move(binding)
      .template Arg<xla::ffi::AnyBuffer>()   // rows
      .template Arg<xla::ffi::AnyBuffer>()   // expert_ids
      .template Arg<xla::ffi::AnyBuffer>()   // slots
      .template Arg<xla::ffi::AnyBuffer>()   // weights
      .template Ret<xla::ffi::AnyBuffer>();  // sums
}

template <typename Binding>
auto BindDispatchGrad(Binding binding) {
  return std::move(binding)
      .template Arg<xla::ffi::AnyBuffer>()   // rows
      .template Arg<xla::ffi::AnyBuffer>()   // expert_ids
      .template Arg<xla::ffi::AnyBuffer>()   // slots
      .template Ret<xla::ffi::AnyBuffer>();  // sums
}

template <typename Binding>
auto BindCombineGrad(Binding binding) {
  return std::move(binding)
      .template Arg<xla::ffi::AnyBuffer>()   // sum_grads
      .template Arg<xla::ffi::AnyBuffer>()   // rows
      .template Arg<xla::ffi::AnyBuffer>()   // expert_ids
      .template Arg<xla::ffi::AnyBuffer>()   // slots
      .template Arg<xla::ffi::AnyBuffer>()   // weights
      .template Arg<xla::ffi::AnyBuffer>()   // group_sizes
      .template Ret<xla::ffi::AnyBuffer>()   // row_grads
      .template Ret<xla::ffi::AnyBuffer>();  // weight_grads
}

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_MOE_OPERANDS_H_

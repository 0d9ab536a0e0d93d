#ifndef TURBOBUS_FFI_OUTCOME_H_
#define TURBOBUS_FFI_OUTCOME_H_

#include <utility>
#include <variant>

#include "base/status.h"
#include "ffi/error.h"
#include "xla/ffi/api/ffi.h"

namespace turbobus::ffi {

/// What a handler returns that is often, but not always, finished when it
/// returns: a status, or a future that XLA waits for without a thread.
class Outcome {
 public:
  Outcome(Status status) : value_(ToError(status)) {}              // NOLINT
  Outcome(xla::ffi::Future future) : value_(std::move(future)) {}  // NOLINT

 private:
  template <xla::ffi::ExecutionStage, typename>
  friend struct xla::ffi::ResultEncoding;

  std::variant<xla::ffi::Error, xla::ffi::Future> value_;
};

}  // namespace turbobus::ffi

template <xla::ffi::ExecutionStage stage>
struct xla::ffi::ResultEncoding<stage, turbobus::ffi::Outcome> {
  static std::variant<XLA_FFI_Error*, XLA_FFI_Future*> Encode(
      const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
      turbobus::ffi::Outcome outcome) {
    if (auto* error = std::get_if<Error>(&outcome.value_)) {
      return ResultEncoding<stage, Error>::Encode(api, ctx, std::move(*error));
    }
    return ResultEncoding<stage, Future>::Encode(
        api, ctx, std::get<Future>(std::move(outcome.value_)));
  }
};

#endif  // TURBOBUS_FFI_OUTCOME_H_

#ifndef TURBOBUS_FFI_ERROR_H_
#define TURBOBUS_FFI_ERROR_H_

#include "base/status.h"
#include "xla/ffi/api/ffi.h"

namespace turbobus::ffi {

/// The one place where a status becomes an XLA FFI error.
inline xla::ffi::Error ToError(const Status& status) {
  if (status.ok()) return xla::ffi::Error::Success();
  return xla::ffi::Error(static_cast<XLA_FFI_Error_Code>(status.code()),
                         "jax_turbobus: " + status.message());
}

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_ERROR_H_

#ifndef TURBOBUS_FFI_MOE_TARGETS_H_
#define TURBOBUS_FFI_MOE_TARGETS_H_

#include <vector>

#include "ffi/targets.h"

namespace turbobus::ffi {

/// dispatch, combine and their gradients (moe_exchange.cc).
std::vector<Target> MoeExchangeTargets();

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_MOE_TARGETS_H_

#ifndef TURBOBUS_FFI_TARGETS_H_
#define TURBOBUS_FFI_TARGETS_H_

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace turbobus::ffi {

inline constexpr int kApiVersionMajor = XLA_FFI_API_MAJOR;
inline constexpr int kApiVersionMinor = XLA_FFI_API_MINOR;

struct Target {
  const char* name;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* initialize = nullptr;  // Before a run executes anything.
};

std::vector<Target> OffloadTargets();
std::vector<Target> MoeTargets();
std::vector<Target> MoeRaggedTargets();

/// All handlers of this library for CPU devices.
std::vector<Target> Targets();

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_TARGETS_H_

#ifndef TURBOBUS_FFI_CUDA_TARGETS_H_
#define TURBOBUS_FFI_CUDA_TARGETS_H_

#include <vector>

#include "ffi/targets.h"

namespace turbobus::ffi {

/// The handlers of docs/ffi.md for CUDA devices.
std::vector<Target> CudaOffloadTargets();

/// The expert exchange's (docs/gpu_exchange.md).
std::vector<Target> CudaMoeTargets();

/// `ragged_all_to_all` and its transpose (docs/gpu_exchange.md).
std::vector<Target> CudaMoeRaggedTargets();

/// All handlers of the CUDA library.
std::vector<Target> CudaTargets();

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_CUDA_TARGETS_H_

#ifndef TURBOBUS_FFI_CUDA_TARGETS_H_
#define TURBOBUS_FFI_CUDA_TARGETS_H_

#include <vector>

#include "ffi/targets.h"

namespace turbobus::ffi {

/// What a stage of a run leaves to later ones; XLA owns it, and destroys it
/// when the run is over.
struct StateType {
  const char* name;
  XLA_FFI_TypeId* id;
  const XLA_FFI_TypeInfo* info;
};

/// All types of states that handlers of the CUDA library make.
std::vector<StateType> CudaStateTypes();

std::vector<StateType> CudaOffloadStateTypes();
std::vector<StateType> CudaMoeStateTypes();

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

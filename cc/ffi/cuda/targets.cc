#include "ffi/cuda/targets.h"

namespace turbobus::ffi {

std::vector<StateType> CudaStateTypes() {
  std::vector<StateType> types = CudaOffloadStateTypes();
  for (const StateType& type : CudaMoeStateTypes()) types.push_back(type);
  return types;
}

std::vector<Target> CudaTargets() {
  std::vector<Target> targets = CudaOffloadTargets();
  for (const Target& target : CudaMoeTargets()) targets.push_back(target);
  for (const Target& target : CudaMoeRaggedTargets()) {
    targets.push_back(target);
  }
  return targets;
}

}  // namespace turbobus::ffi

#include "ffi/targets.h"

namespace turbobus::ffi {

std::vector<Target> Targets() {
  std::vector<Target> targets = OffloadTargets();
  for (const Target& target : MoeTargets()) targets.push_back(target);
  for (const Target& target : MoeRaggedTargets()) targets.push_back(target);
  return targets;
}

}  // namespace turbobus::ffi

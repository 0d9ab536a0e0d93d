#include "ffi/targets.h"

namespace turbobus::ffi {

std::vector<Target> MoeTargets() { return {}; }

}  // namespace turbobus::ffi

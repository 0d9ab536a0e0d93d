#include "ffi/targets.h"

namespace turbobus::ffi {

std::vector<Target> OffloadTargets() { return {}; }

}  // namespace turbobus::ffi

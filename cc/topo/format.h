#ifndef TURBOBUS_TOPO_FORMAT_H_
#define TURBOBUS_TOPO_FORMAT_H_

#include <string_view>

namespace turbobus::topo {

/// What a topology file calls itself (docs/topology.md).
inline constexpr std::string_view kFormat = "jax_turbobus/topology";
inline constexpr int kVersion = 1;

}  // namespace turbobus::topo

#endif  // TURBOBUS_TOPO_FORMAT_H_

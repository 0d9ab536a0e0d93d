#ifndef TURBOBUS_TOPO_VALIDATE_H_
#define TURBOBUS_TOPO_VALIDATE_H_

#include "base/status.h"
#include "topo/graph.h"

namespace turbobus::topo {

/// More than one machine has; keeps hostile files from costing minutes.
inline constexpr int kMaxNodes = 64;
inline constexpr int kMaxSwitches = 256;
inline constexpr int kMaxLinks = 1024;
inline constexpr double kMaxBytesPerS = 1e15;
inline constexpr int64_t kMaxLatencyNs = 1'000'000'000;

/// Whether the graph makes sense entry by entry: names unique, indices in
/// range, rates positive and finite, links between kinds of node that such a
/// link can join, nothing listed twice. Does not look at reachability.
/// INVALID_ARGUMENT names the field, what was expected, what came.
Status Validate(const Graph& graph);

}  // namespace turbobus::topo

#endif  // TURBOBUS_TOPO_VALIDATE_H_

#ifndef TURBOBUS_TRANSPORT_HOST_TOPOLOGY_LINKS_H_
#define TURBOBUS_TRANSPORT_HOST_TOPOLOGY_LINKS_H_

#include <vector>

#include "topo/topology.h"
#include "transport/host/link_model.h"

namespace turbobus::transport::host {

/// A path's links by hop, from the source: one hop, or on a relay path the way
/// to the relay and the way from it.
std::vector<std::vector<topo::Hop>> SplitAtRelay(const topo::Topology& topology,
                                                 const topo::Path& path);

/// The links, link groups and memories of `topology` for lanes on `paths`, all
/// rates times `rate_scale`. Each relay has a staging ring for each direction.
LinkModel EmulatedLinks(const topo::Topology& topology,
                        const std::vector<topo::Path>& paths,
                        double rate_scale);

}  // namespace turbobus::transport::host

#endif  // TURBOBUS_TRANSPORT_HOST_TOPOLOGY_LINKS_H_

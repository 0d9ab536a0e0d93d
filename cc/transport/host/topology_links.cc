#include "transport/host/topology_links.h"

#include <map>
#include <optional>
#include <utility>

namespace turbobus::transport::host {
namespace {

// The fabric between a relay path's GPU and its relay, in the path's direction.
std::optional<topo::PeerPath> Fabric(const topo::Topology& topology,
                                     const topo::Path& path) {
  const bool is_h2d = path.direction == topo::Direction::kH2d;
  const int src = is_h2d ? path.relay : path.gpu;
  const int dst = is_h2d ? path.gpu : path.relay;
  for (topo::PeerPath& peer : topology.PeerPaths(src, dst)) {
    if (peer.kind == topo::PeerKind::kPeer) return std::move(peer);
  }
  return std::nullopt;
}

topo::Path RelaysOwnPath(const topo::Topology& topology,
                         const topo::Path& path) {
  return topology.Paths(path.relay, path.direction, path.numa_node).front();
}

}  // namespace

std::vector<std::vector<topo::Hop>> SplitAtRelay(const topo::Topology& topology,
                                                 const topo::Path& path) {
  const std::vector<topo::Hop> all = topology.Hops(path);
  if (!path.is_relay()) return {all};
  const size_t num_host_links = RelaysOwnPath(topology, path).links.size();
  const size_t num_first = path.direction == topo::Direction::kH2d
                               ? num_host_links
                               : all.size() - num_host_links;
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(num_first);
  return {{all.begin(), middle}, {middle, all.end()}};
}

LinkModel EmulatedLinks(const topo::Topology& topology,
                        const std::vector<topo::Path>& paths,
                        double rate_scale) {
  LinkModel model;
  for (const topo::Resource& resource : topology.resources()) {
    model.rates_bytes_per_s.push_back(resource.bandwidth_bytes_per_s *
                                      rate_scale);
  }
  std::map<std::pair<int, topo::Direction>, int> stagings;
  for (const topo::Path& path : paths) {
    if (!path.is_relay()) {
      model.lanes.push_back({.hops = {{.resources = topology.ResourcesOf(path),
                                       .latency_ns = path.latency_ns}}});
      continue;
    }
    const topo::Path host = RelaysOwnPath(topology, path);
    HopModel host_hop{.resources = topology.ResourcesOf(host),
                      .latency_ns = host.latency_ns};
    HopModel fabric_hop;
    if (const std::optional<topo::PeerPath> fabric = Fabric(topology, path)) {
      fabric_hop = {.resources = topology.ResourcesOf(*fabric),
                    .latency_ns = fabric->latency_ns};
    }
    const auto [staging, is_new] = stagings.try_emplace(
        {path.relay, path.direction}, static_cast<int>(stagings.size()));
    LaneModel lane{.staging = staging->second};
    if (path.direction == topo::Direction::kH2d) {
      lane.hops = {std::move(host_hop), std::move(fabric_hop)};
    } else {
      lane.hops = {std::move(fabric_hop), std::move(host_hop)};
    }
    model.lanes.push_back(std::move(lane));
  }
  model.num_stagings = static_cast<int>(stagings.size());
  return model;
}

}  // namespace turbobus::transport::host

#include "topo/topology.h"

#include <algorithm>
#include <limits>

#include "topo/validate.h"

namespace turbobus::topo {

StatusOr<Topology> Topology::Create(Graph graph, std::string_view source) {
  if (const Status status = Validate(graph); !status.ok()) {
    return status.WithContext("topology " + std::string(source));
  }
  Topology topology;
  topology.graph_ = std::move(graph);
  TB_RETURN_IF_ERROR(topology.ComputeRoutes(source));
  topology.ComputePeers();
  topology.ComputeResources();
  topology.ComputeLinkGroups();
  return topology;
}

bool Topology::HasPeerAccess(int a, int b) const {
  return a != b && PeerRoute(a, b).is_found;
}

bool Topology::CanRelay(int gpu, int relay) const {
  if (!HasPeerAccess(gpu, relay)) return false;
  const Route& host = HostRoute(graph_.gpus[relay].numa_node, relay);
  const Route& peer = PeerRoute(gpu, relay);
  for (const Hop& hop : peer.hops) {
    const bool is_shared =
        std::any_of(host.hops.begin(), host.hops.end(),
                    [&](const Hop& other) { return other.link == hop.link; });
    if (is_shared) return false;
  }
  const auto slowest = [&](const Route& route) {
    double rate = std::numeric_limits<double>::infinity();
    for (const Hop& hop : route.hops) {
      const Link& link = graph_.links[hop.link];
      rate = std::min({rate, link.a_to_b_bytes_per_s, link.b_to_a_bytes_per_s});
    }
    return rate;
  };
  return slowest(peer) >= kRelayFabricFactor * slowest(host);
}

std::vector<Path> Topology::Paths(int gpu, Direction direction) const {
  return Paths(gpu, direction, graph_.gpus[gpu].numa_node);
}

std::vector<Path> Topology::Paths(int gpu, Direction direction,
                                  int numa_node) const {
  const Path direct = MakePath(gpu, kNoRelay, direction, numa_node);
  std::vector<Path> relays;
  for (int relay = 0; relay < static_cast<int>(graph_.gpus.size()); ++relay) {
    if (!CanRelay(gpu, relay)) continue;
    Path path = MakePath(gpu, relay, direction, numa_node);
    // What the two carry together shows whether their links are independent: a
    // relay behind the same switch uplink adds nothing.
    const std::vector<double> rates = Rates({direct, path});
    constexpr double kLeastGain = 1.05;
    if (rates[0] + rates[1] < kLeastGain * Rates({direct})[0]) continue;
    relays.push_back(std::move(path));
  }
  std::stable_sort(relays.begin(), relays.end(),
                   [](const Path& a, const Path& b) {
                     return a.bandwidth_bytes_per_s > b.bandwidth_bytes_per_s;
                   });
  relays.insert(relays.begin(), direct);
  return relays;
}

Path Topology::MakePath(int gpu, int relay, Direction direction,
                        int numa_node) const {
  const int lender = relay == kNoRelay ? gpu : relay;
  std::vector<Hop> hops;
  Append(HostRoute(numa_node, lender), /*is_reversed=*/false, hops);
  if (relay != kNoRelay)
    Append(PeerRoute(relay, gpu), /*is_reversed=*/false, hops);
  if (direction == Direction::kD2h) {
    std::reverse(hops.begin(), hops.end());
    for (Hop& hop : hops) hop.is_a_to_b = !hop.is_a_to_b;
  }
  Path path;
  path.gpu = gpu;
  path.relay = relay;
  path.numa_node = numa_node;
  path.direction = direction;
  path.link_group = group_of_gpu_.empty() ? 0 : group_of_gpu_[lender];
  Measure(hops, path.bandwidth_bytes_per_s, path.latency_ns);
  for (const Hop& hop : hops) path.links.push_back(hop.link);
  return path;
}

void Topology::Measure(const std::vector<Hop>& hops,
                       double& bandwidth_bytes_per_s,
                       int64_t& latency_ns) const {
  bandwidth_bytes_per_s = std::numeric_limits<double>::infinity();
  latency_ns = 0;
  for (const Hop& hop : hops) {
    const Link& link = graph_.links[hop.link];
    bandwidth_bytes_per_s = std::min(
        bandwidth_bytes_per_s,
        hop.is_a_to_b ? link.a_to_b_bytes_per_s : link.b_to_a_bytes_per_s);
    latency_ns += link.latency_ns;
  }
}

std::vector<PeerPath> Topology::PeerPaths(int src, int dst) const {
  std::vector<PeerPath> paths;
  const auto add = [&](PeerKind kind, int via, const std::vector<Hop>& hops) {
    PeerPath path;
    path.src = src;
    path.dst = dst;
    path.kind = kind;
    path.via = via;
    Measure(hops, path.bandwidth_bytes_per_s, path.latency_ns);
    for (const Hop& hop : hops) path.links.push_back(hop.link);
    // A resource that is crossed twice (host memory, a PCIe link up and down at
    // half duplex) gives each crossing its half.
    path.bandwidth_bytes_per_s =
        std::min(path.bandwidth_bytes_per_s, FairRates({ResourcesOf(path)})[0]);
    paths.push_back(std::move(path));
  };
  if (HasPeerAccess(src, dst))
    add(PeerKind::kPeer, -1, PeerRoute(src, dst).hops);
  for (int via = 0; via < static_cast<int>(graph_.gpus.size()); ++via) {
    if (!HasPeerAccess(src, via) || !HasPeerAccess(via, dst)) continue;
    std::vector<Hop> hops;
    Append(PeerRoute(src, via), /*is_reversed=*/false, hops);
    Append(PeerRoute(via, dst), /*is_reversed=*/false, hops);
    add(PeerKind::kRelay, via, hops);
  }
  for (int node = 0; node < static_cast<int>(graph_.numa_nodes.size());
       ++node) {
    std::vector<Hop> hops;
    Append(HostRoute(node, src), /*is_reversed=*/true, hops);
    Append(HostRoute(node, dst), /*is_reversed=*/false, hops);
    add(PeerKind::kHost, node, hops);
  }
  std::stable_sort(paths.begin(), paths.end(),
                   [](const PeerPath& a, const PeerPath& b) {
                     if (a.bandwidth_bytes_per_s != b.bandwidth_bytes_per_s) {
                       return a.bandwidth_bytes_per_s > b.bandwidth_bytes_per_s;
                     }
                     return a.latency_ns < b.latency_ns;
                   });
  return paths;
}

std::vector<Hop> Topology::Hops(const Path& path) const {
  return HopsFrom(path.direction == Direction::kH2d
                      ? NodeRef{NodeKind::kNuma, path.numa_node}
                      : NodeRef{NodeKind::kGpu, path.gpu},
                  path.links);
}

std::vector<Hop> Topology::Hops(const PeerPath& path) const {
  return HopsFrom({NodeKind::kGpu, path.src}, path.links);
}

std::vector<Hop> Topology::HopsFrom(NodeRef source,
                                    const std::vector<int>& links) const {
  std::vector<Hop> hops;
  NodeRef at = source;
  for (const int index : links) {
    const Link& link = graph_.links[index];
    const bool is_a_to_b = link.a == at;
    hops.push_back({index, is_a_to_b});
    at = is_a_to_b ? link.b : link.a;
  }
  return hops;
}

double Topology::PooledBandwidth(int gpu, Direction direction) const {
  double sum = 0;
  for (const double rate : Rates(Paths(gpu, direction))) sum += rate;
  return sum;
}

LanePlan Topology::Lanes(const LaneOptions& options) const {
  LanePlan plan;
  std::vector<int> nodes = options.numa_nodes;
  if (nodes.empty()) {
    for (size_t i = 0; i < graph_.numa_nodes.size(); ++i) {
      nodes.push_back(static_cast<int>(i));
    }
  }
  for (int gpu = 0; gpu < static_cast<int>(graph_.gpus.size()); ++gpu) {
    for (const Direction direction : {Direction::kH2d, Direction::kD2h}) {
      for (const int node : nodes) {
        for (Path& path : Paths(gpu, direction, node)) {
          if (path.is_relay() && !options.has_relays) continue;
          plan.paths.push_back(std::move(path));
        }
      }
    }
  }
  std::vector<double> demand(resources_.size(), 0);
  std::vector<std::vector<int>> uses;
  for (const Path& path : plan.paths) {
    uses.push_back(ResourcesOf(path));
    for (const int resource : uses.back()) {
      demand[resource] += path.bandwidth_bytes_per_s;
    }
  }
  std::vector<int> cap_of(resources_.size(), -1);
  for (size_t i = 0; i < resources_.size(); ++i) {
    constexpr double kRounding = 1 + 1e-9;
    const bool is_binding =
        demand[i] > resources_[i].bandwidth_bytes_per_s * kRounding;
    if (demand[i] == 0 || (options.only_binding_caps && !is_binding)) continue;
    cap_of[i] = static_cast<int>(plan.caps.size());
    plan.caps.push_back(resources_[i]);
  }
  for (const std::vector<int>& resources : uses) {
    std::vector<int>& caps = plan.lane_caps.emplace_back();
    for (const int resource : resources) {
      if (cap_of[resource] >= 0) caps.push_back(cap_of[resource]);
    }
  }
  return plan;
}

double Score(double bandwidth_bytes_per_s, int64_t latency_ns,
             int64_t size_bytes) {
  const double size = static_cast<double>(size_bytes);
  const double seconds =
      static_cast<double>(latency_ns) * 1e-9 + size / bandwidth_bytes_per_s;
  return seconds > 0 ? size / seconds : 0;
}

}  // namespace turbobus::topo

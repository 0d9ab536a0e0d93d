#include <algorithm>
#include <deque>
#include <limits>

#include "topo/json.h"
#include "topo/topology.h"

namespace turbobus::topo {
namespace {

/// The graph as adjacency lists over one numbering of all nodes.
class Adjacency {
 public:
  struct Edge {
    int to = 0;
    Hop hop;
    double slower_direction = 0;
  };

  Adjacency(const Graph& graph, bool nvlink_only)
      : num_gpus_(static_cast<int>(graph.gpus.size())),
        num_numa_(static_cast<int>(graph.numa_nodes.size())),
        edges_(num_gpus_ + num_numa_ + graph.switches.size()) {
    for (int i = 0; i < static_cast<int>(graph.links.size()); ++i) {
      const Link& link = graph.links[i];
      if (nvlink_only && link.type != LinkType::kNvlink) continue;
      const double rate =
          std::min(link.a_to_b_bytes_per_s, link.b_to_a_bytes_per_s);
      edges_[Number(link.a)].push_back({Number(link.b), {i, true}, rate});
      edges_[Number(link.b)].push_back({Number(link.a), {i, false}, rate});
    }
  }

  int Number(NodeRef node) const {
    switch (node.kind) {
      case NodeKind::kGpu:
        return node.index;
      case NodeKind::kNuma:
        return num_gpus_ + node.index;
      case NodeKind::kSwitch:
        break;
    }
    return num_gpus_ + num_numa_ + node.index;
  }

  bool IsGpu(int number) const { return number < num_gpus_; }
  size_t size() const { return edges_.size(); }
  const std::vector<Edge>& EdgesOf(int number) const { return edges_[number]; }

 private:
  int num_gpus_;
  int num_numa_;
  std::vector<std::vector<Edge>> edges_;
};

}  // namespace

/// Hardware routes by the fewest hops; of those the widest, so that the answer
/// does not depend on the order in the file unless two are alike. A GPU is
/// never on the way: going through one is a relay, and the caller's choice.
Topology::Route Topology::FindRoute(NodeRef from, NodeRef to,
                                    bool nvlink_only) const {
  const Adjacency graph(graph_, nvlink_only);
  const int source = graph.Number(from);
  const int target = graph.Number(to);
  constexpr int kUnseen = -1;
  std::vector<int> distance(graph.size(), kUnseen);
  std::vector<double> width(graph.size(), 0);
  std::vector<std::pair<int, Hop>> arrived_by(graph.size());
  distance[source] = 0;
  width[source] = std::numeric_limits<double>::infinity();
  std::deque<int> queue = {source};
  // A node is taken from the queue after every node nearer to the source, so
  // its width is final by then.
  while (!queue.empty()) {
    const int node = queue.front();
    queue.pop_front();
    if (node == target) break;
    if (node != source && graph.IsGpu(node)) continue;
    for (const Adjacency::Edge& edge : graph.EdgesOf(node)) {
      if (distance[edge.to] == kUnseen) {
        distance[edge.to] = distance[node] + 1;
        queue.push_back(edge.to);
      }
      const double through = std::min(width[node], edge.slower_direction);
      if (distance[edge.to] == distance[node] + 1 && through > width[edge.to]) {
        width[edge.to] = through;
        arrived_by[edge.to] = {node, edge.hop};
      }
    }
  }
  Route route;
  if (distance[target] == kUnseen) return route;
  for (int node = target; node != source; node = arrived_by[node].first) {
    route.hops.push_back(arrived_by[node].second);
  }
  std::reverse(route.hops.begin(), route.hops.end());
  route.is_found = true;
  return route;
}

Status Topology::ComputeRoutes(std::string_view source) {
  const int num_gpus = static_cast<int>(graph_.gpus.size());
  const int num_numa = static_cast<int>(graph_.numa_nodes.size());
  const auto fail = [&](const std::string& message) {
    return InvalidArgument("topology " + std::string(source) + ": " + message);
  };
  for (int node = 1; node < num_numa; ++node) {
    if (!FindRoute({NodeKind::kNuma, 0}, {NodeKind::kNuma, node}, false)
             .is_found) {
      return fail("numa_nodes[" + std::to_string(node) + "] (" +
                  Quote(graph_.numa_nodes[node].id) + "): expected a way to " +
                  Quote(graph_.numa_nodes[0].id) +
                  ", got none; add the upi link between the sockets");
    }
  }
  host_routes_.resize(static_cast<size_t>(num_numa) * num_gpus);
  for (int node = 0; node < num_numa; ++node) {
    for (int gpu = 0; gpu < num_gpus; ++gpu) {
      Route route =
          FindRoute({NodeKind::kNuma, node}, {NodeKind::kGpu, gpu}, false);
      if (!route.is_found) {
        return fail(
            "gpus[" + std::to_string(gpu) + "] (" + Quote(graph_.gpus[gpu].id) +
            "): expected a way to host memory over pcie or c2c links, got "
            "none; add the link between the GPU and its NUMA node or switch");
      }
      host_routes_[static_cast<size_t>(node) * num_gpus + gpu] =
          std::move(route);
    }
  }
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    if (graph_.gpus[gpu].numa_node != kUnknownNuma) continue;
    int nearest = 0;
    for (int node = 1; node < num_numa; ++node) {
      if (HostRoute(node, gpu).hops.size() <
          HostRoute(nearest, gpu).hops.size()) {
        nearest = node;
      }
    }
    graph_.gpus[gpu].numa_node = nearest;
  }
  return OkStatus();
}

void Topology::ComputePeers() {
  const int num_gpus = static_cast<int>(graph_.gpus.size());
  peer_routes_.resize(static_cast<size_t>(num_gpus) * num_gpus);
  const auto add = [&](int a, int b, const Route& route) {
    Route back;
    back.is_found = route.is_found;
    Append(route, /*is_reversed=*/true, back.hops);
    peer_routes_[static_cast<size_t>(a) * num_gpus + b] = route;
    peer_routes_[static_cast<size_t>(b) * num_gpus + a] = std::move(back);
  };
  if (!graph_.has_peer_access_list) {
    for (int a = 0; a < num_gpus; ++a) {
      for (int b = a + 1; b < num_gpus; ++b) {
        const Route route = FindRoute({NodeKind::kGpu, a}, {NodeKind::kGpu, b},
                                      /*nvlink_only=*/true);
        if (!route.is_found) continue;
        add(a, b, route);
      }
    }
    return;
  }
  for (const auto& [a, b] : graph_.peer_access) {
    const NodeRef from{NodeKind::kGpu, std::min(a, b)};
    const NodeRef to{NodeKind::kGpu, std::max(a, b)};
    Route route = FindRoute(from, to, /*nvlink_only=*/true);
    if (!route.is_found) route = FindRoute(from, to, /*nvlink_only=*/false);
    add(from.index, to.index, route);
  }
}

const Topology::Route& Topology::HostRoute(int numa_node, int gpu) const {
  return host_routes_[static_cast<size_t>(numa_node) * graph_.gpus.size() +
                      gpu];
}

const Topology::Route& Topology::PeerRoute(int a, int b) const {
  return peer_routes_[static_cast<size_t>(a) * graph_.gpus.size() + b];
}

void Topology::Append(const Route& route, bool is_reversed,
                      std::vector<Hop>& hops) {
  if (!is_reversed) {
    hops.insert(hops.end(), route.hops.begin(), route.hops.end());
    return;
  }
  for (auto it = route.hops.rbegin(); it != route.hops.rend(); ++it) {
    hops.push_back({it->link, !it->is_a_to_b});
  }
}

}  // namespace turbobus::topo

#include <algorithm>
#include <limits>
#include <numeric>

#include "topo/topology.h"

namespace turbobus::topo {
namespace {

/// Two GPUs are one link group if together they carry less than this much of
/// what they carry alone.
constexpr double kIndependentFraction = 0.95;

}  // namespace

void Topology::ComputeResources() {
  const auto add = [&](std::string name, double rate) {
    resources_.push_back({std::move(name), rate});
    return static_cast<int>(resources_.size()) - 1;
  };
  for (const Link& link : graph_.links) {
    const std::string& a = NodeId(graph_, link.a);
    const std::string& b = NodeId(graph_, link.b);
    link_resource_.push_back(
        add(link.id + " " + b + "->" + a, link.b_to_a_bytes_per_s));
    link_resource_.push_back(
        add(link.id + " " + a + "->" + b, link.a_to_b_bytes_per_s));
    duplex_resource_.push_back(
        link.duplex_bytes_per_s == 0
            ? -1
            : add(link.id + " both ways", link.duplex_bytes_per_s));
  }
  for (const NumaNode& node : graph_.numa_nodes) {
    memory_resource_.push_back(
        node.memory_bytes_per_s == 0
            ? -1
            : add(node.id + " memory", node.memory_bytes_per_s));
  }
  group_resource_.assign(2 * graph_.gpus.size(), -1);
  for (const LinkGroup& group : graph_.link_groups) {
    const int h2d = add("group " + group.id + " h2d", group.h2d_bytes_per_s);
    const int d2h = add("group " + group.id + " d2h", group.d2h_bytes_per_s);
    for (const int gpu : group.gpus) {
      group_resource_[2 * gpu + static_cast<int>(Direction::kH2d)] = h2d;
      group_resource_[2 * gpu + static_cast<int>(Direction::kD2h)] = d2h;
    }
  }
}

void Topology::AddLinkResources(const std::vector<Hop>& hops,
                                std::vector<int>& out) const {
  for (const Hop& hop : hops) {
    out.push_back(link_resource_[2 * hop.link + (hop.is_a_to_b ? 1 : 0)]);
    if (duplex_resource_[hop.link] >= 0)
      out.push_back(duplex_resource_[hop.link]);
  }
}

void Topology::AddGroupResource(int gpu, Direction direction,
                                std::vector<int>& out) const {
  const int resource = group_resource_[2 * gpu + static_cast<int>(direction)];
  if (resource >= 0) out.push_back(resource);
}

std::vector<int> Topology::ResourcesOf(const Path& path) const {
  std::vector<int> out;
  AddLinkResources(Hops(path), out);
  AddGroupResource(path.is_relay() ? path.relay : path.gpu, path.direction,
                   out);
  if (memory_resource_[path.numa_node] >= 0) {
    out.push_back(memory_resource_[path.numa_node]);
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<int> Topology::ResourcesOf(const PeerPath& path) const {
  std::vector<int> out;
  AddLinkResources(Hops(path), out);
  if (path.kind == PeerKind::kHost) {
    AddGroupResource(path.src, Direction::kD2h, out);
    AddGroupResource(path.dst, Direction::kH2d, out);
    // Once written and once read.
    const int memory = memory_resource_[path.via];
    if (memory >= 0) out.insert(out.end(), 2, memory);
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<double> Topology::Rates(const std::vector<Path>& paths) const {
  std::vector<std::vector<int>> uses;
  for (const Path& path : paths) uses.push_back(ResourcesOf(path));
  return FairRates(uses);
}

/// Progressive filling: all rates rise together; when a resource is full, the
/// flows on it stop there and the others go on. Each round freezes at least one
/// flow, so it ends.
std::vector<double> Topology::FairRates(
    const std::vector<std::vector<int>>& uses) const {
  std::vector<double> left(resources_.size());
  for (size_t i = 0; i < left.size(); ++i) {
    left[i] = resources_[i].bandwidth_bytes_per_s;
  }
  std::vector<double> rates(uses.size(), 0);
  std::vector<bool> is_frozen(uses.size(), false);
  for (size_t num_frozen = 0; num_frozen < uses.size();) {
    std::vector<int> num_crossings(resources_.size(), 0);
    for (size_t flow = 0; flow < uses.size(); ++flow) {
      if (is_frozen[flow]) continue;
      for (const int resource : uses[flow]) ++num_crossings[resource];
    }
    double step = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < left.size(); ++i) {
      if (num_crossings[i] > 0)
        step = std::min(step, left[i] / num_crossings[i]);
    }
    std::vector<bool> is_full(resources_.size(), false);
    for (size_t i = 0; i < left.size(); ++i) {
      if (num_crossings[i] == 0) continue;
      // The one that set the step is full however the subtraction rounds.
      is_full[i] = left[i] / num_crossings[i] <= step * (1 + 1e-12);
      left[i] = std::max(0.0, left[i] - step * num_crossings[i]);
    }
    for (size_t flow = 0; flow < uses.size(); ++flow) {
      if (is_frozen[flow]) continue;
      rates[flow] += step;
      is_frozen[flow] =
          std::any_of(uses[flow].begin(), uses[flow].end(),
                      [&](int resource) { return is_full[resource]; });
      if (is_frozen[flow]) ++num_frozen;
    }
  }
  return rates;
}

void Topology::ComputeLinkGroups() {
  const int num_gpus = static_cast<int>(graph_.gpus.size());
  std::vector<int> parent(num_gpus);
  std::iota(parent.begin(), parent.end(), 0);
  const auto root = [&](int gpu) {
    while (parent[gpu] != gpu) gpu = parent[gpu];
    return gpu;
  };
  const auto join = [&](int a, int b) {
    a = root(a);
    b = root(b);
    parent[std::max(a, b)] = std::min(a, b);
  };
  for (const LinkGroup& group : graph_.link_groups) {
    for (const int gpu : group.gpus) join(group.gpus[0], gpu);
  }
  // Host memory that all GPUs share does not make them one group, and neither
  // does a socket's link to the other: only what lies below their own node.
  const auto rates_of = [&](const std::vector<int>& gpus, Direction direction) {
    std::vector<std::vector<int>> uses;
    for (const int gpu : gpus) {
      std::vector<Hop> hops;
      Append(HostRoute(graph_.gpus[gpu].numa_node, gpu),
             direction == Direction::kD2h, hops);
      AddLinkResources(hops, uses.emplace_back());
      AddGroupResource(gpu, direction, uses.back());
    }
    const std::vector<double> rates = FairRates(uses);
    return std::accumulate(rates.begin(), rates.end(), 0.0);
  };
  for (const Direction direction : {Direction::kH2d, Direction::kD2h}) {
    for (int a = 0; a < num_gpus; ++a) {
      for (int b = a + 1; b < num_gpus; ++b) {
        const double alone =
            rates_of({a}, direction) + rates_of({b}, direction);
        if (rates_of({a, b}, direction) < kIndependentFraction * alone)
          join(a, b);
      }
    }
  }
  group_of_gpu_.assign(num_gpus, -1);
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    const int first = root(gpu);
    if (first == gpu) {
      group_of_gpu_[gpu] = static_cast<int>(link_groups_.size());
      link_groups_.emplace_back();
    }
    group_of_gpu_[gpu] = group_of_gpu_[first];
    LinkGroup& group = link_groups_[group_of_gpu_[gpu]];
    group.id += (group.gpus.empty() ? "" : "+") + graph_.gpus[gpu].id;
    group.gpus.push_back(gpu);
  }
  for (const LinkGroup& measured : graph_.link_groups) {
    link_groups_[group_of_gpu_[measured.gpus[0]]].id = measured.id;
  }
  for (LinkGroup& group : link_groups_) {
    group.h2d_bytes_per_s = rates_of(group.gpus, Direction::kH2d);
    group.d2h_bytes_per_s = rates_of(group.gpus, Direction::kD2h);
  }
}

}  // namespace turbobus::topo

#include "topo/validate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "topo/json.h"

namespace turbobus::topo {
namespace {

constexpr size_t kMaxTextBytes = 1024;

std::string Entry(std::string_view list, size_t index, const std::string& id) {
  std::string out = std::string(list) + "[" + std::to_string(index) + "]";
  return id.empty() ? out : out + " (" + Quote(id) + ")";
}

Status Wrong(const std::string& where, std::string_view expected,
             const std::string& got, std::string_view hint = "") {
  std::string message =
      where + ": expected " + std::string(expected) + ", got " + got;
  if (!hint.empty()) message += "; " + std::string(hint);
  return InvalidArgument(std::move(message));
}

Status CheckCount(std::string_view list, size_t count, size_t limit) {
  if (count <= limit) return OkStatus();
  return Wrong(std::string(list),
               "at most " + std::to_string(limit) + " entries",
               std::to_string(count));
}

Status CheckRate(const std::string& where, double rate,
                 bool is_optional = false) {
  if (is_optional && rate == 0) return OkStatus();
  // Below a byte a second is a unit gone wrong, and would overflow durations.
  if (std::isfinite(rate) && rate >= 1 && rate <= kMaxBytesPerS)
    return OkStatus();
  return Wrong(
      where, "bytes per second from 1 to 1e15",
      std::isfinite(rate) ? JsonNumber(rate) : "a number that is not finite",
      "give the rate in bytes (not bits or GB) per second");
}

Status CheckPartOfMax(const std::string& where, std::string_view field, int now,
                      int max, int limit) {
  const std::string max_name = "max_" + std::string(field);
  for (const auto& [name, value] :
       {std::pair(std::string(field), now), std::pair(max_name, max)}) {
    if (value < 0 || value > limit) {
      return Wrong(where + "." + name,
                   "0 (unknown) to " + std::to_string(limit),
                   std::to_string(value));
    }
  }
  if (max != 0 && now > max) {
    return Wrong(where + "." + std::string(field),
                 "at most " + max_name + " = " + std::to_string(max),
                 std::to_string(now), "correct one of the two");
  }
  if (max != 0 && now == 0) {
    return Wrong(where + "." + std::string(field),
                 "a value beside " + max_name + " = " + std::to_string(max),
                 "nothing", "give both or neither");
  }
  return OkStatus();
}

/// Ids of all kinds of node share one name space: links use them.
class NodeNames {
 public:
  Status Add(std::string_view list, size_t index, const std::string& id) {
    const std::string where = Entry(list, index, "");
    if (id.empty()) return Wrong(where + ".id", "a name", "an empty string");
    if (id.size() > 64) {
      return Wrong(where + ".id", "at most 64 bytes", Quote(id));
    }
    const auto [it, is_new] = seen_.emplace(id, where);
    if (is_new) return OkStatus();
    return Wrong(where + ".id", "a name that no other node has",
                 Quote(id) + ", which is " + it->second + " too",
                 "rename one of them");
  }

 private:
  std::map<std::string, std::string> seen_;
};

Status CheckNodes(const Graph& graph) {
  NodeNames names;
  if (graph.numa_nodes.empty()) {
    return Wrong("numa_nodes", "at least one entry", "none",
                 "every machine has host memory: add {\"id\": \"numa0\"}");
  }
  TB_RETURN_IF_ERROR(
      CheckCount("numa_nodes", graph.numa_nodes.size(), kMaxNodes));
  TB_RETURN_IF_ERROR(
      CheckCount("switches", graph.switches.size(), kMaxSwitches));
  TB_RETURN_IF_ERROR(CheckCount("gpus", graph.gpus.size(), kMaxNodes));
  for (size_t i = 0; i < graph.numa_nodes.size(); ++i) {
    const NumaNode& node = graph.numa_nodes[i];
    TB_RETURN_IF_ERROR(names.Add("numa_nodes", i, node.id));
    TB_RETURN_IF_ERROR(
        CheckRate(Entry("numa_nodes", i, node.id) + ".memory_bytes_per_s",
                  node.memory_bytes_per_s, /*is_optional=*/true));
  }
  for (size_t i = 0; i < graph.switches.size(); ++i) {
    TB_RETURN_IF_ERROR(names.Add("switches", i, graph.switches[i].id));
  }
  for (size_t i = 0; i < graph.gpus.size(); ++i) {
    TB_RETURN_IF_ERROR(names.Add("gpus", i, graph.gpus[i].id));
  }
  return OkStatus();
}

Status CheckGpus(const Graph& graph) {
  std::map<std::string, size_t> uuids;
  std::map<std::string, size_t> addresses;
  for (size_t i = 0; i < graph.gpus.size(); ++i) {
    const Gpu& gpu = graph.gpus[i];
    const std::string where = Entry("gpus", i, gpu.id);
    const int num_numa = static_cast<int>(graph.numa_nodes.size());
    if (gpu.numa_node < kUnknownNuma || gpu.numa_node >= num_numa) {
      return Wrong(where + ".numa_node", "a NUMA node of this file",
                   "index " + std::to_string(gpu.numa_node));
    }
    const auto check_unique =
        [&](std::string_view field, const std::string& value,
            std::map<std::string, size_t>& seen) -> Status {
      if (value.empty()) return OkStatus();
      const auto [it, is_new] = seen.emplace(value, i);
      if (is_new) return OkStatus();
      return Wrong(where + "." + std::string(field), "a value no other GPU has",
                   Quote(value) + ", which is " +
                       Entry("gpus", it->second, graph.gpus[it->second].id) +
                       "'s",
                   "list each GPU once");
    };
    TB_RETURN_IF_ERROR(check_unique("uuid", gpu.uuid, uuids));
    TB_RETURN_IF_ERROR(check_unique("pci_address", gpu.pci_address, addresses));
  }
  return OkStatus();
}

bool IsInRange(const Graph& graph, NodeRef node) {
  const size_t sizes[] = {graph.gpus.size(), graph.numa_nodes.size(),
                          graph.switches.size()};
  return node.index >= 0 &&
         static_cast<size_t>(node.index) < sizes[static_cast<int>(node.kind)];
}

bool IsNvswitch(const Graph& graph, NodeRef node) {
  return node.kind == NodeKind::kSwitch &&
         graph.switches[node.index].type == SwitchType::kNvswitch;
}

bool CanEnd(const Graph& graph, LinkType type, NodeRef node) {
  switch (type) {
    case LinkType::kPcie:
      return !IsNvswitch(graph, node);
    case LinkType::kNvlink:
      return node.kind == NodeKind::kGpu || IsNvswitch(graph, node);
    case LinkType::kUpi:
      return node.kind == NodeKind::kNuma;
    case LinkType::kC2c:
      return node.kind != NodeKind::kSwitch;
  }
  return false;
}

std::string_view WhatItJoins(LinkType type) {
  switch (type) {
    case LinkType::kPcie:
      return "a GPU, a NUMA node or a PCIe switch at each end of a pcie link";
    case LinkType::kNvlink:
      return "a GPU or an nvswitch at each end of an nvlink link";
    case LinkType::kUpi:
      return "a NUMA node at each end of a upi link";
    case LinkType::kC2c:
      return "a GPU or a NUMA node at each end of a c2c link";
  }
  return "a known link type";
}

Status CheckLink(const Graph& graph, const Link& link,
                 const std::string& where) {
  for (const auto& [field, node] :
       {std::pair("a", link.a), std::pair("b", link.b)}) {
    const std::string end = where + "." + field;
    if (!IsInRange(graph, node)) {
      return Wrong(end, "a node of this file",
                   "index " + std::to_string(node.index));
    }
    if (!CanEnd(graph, link.type, node)) {
      return Wrong(end, WhatItJoins(link.type), Quote(NodeId(graph, node)));
    }
  }
  if (link.a == link.b) {
    return Wrong(where, "two different ends",
                 Quote(NodeId(graph, link.a)) + " at both");
  }
  TB_RETURN_IF_ERROR(
      CheckRate(where + ".a_to_b_bytes_per_s", link.a_to_b_bytes_per_s));
  TB_RETURN_IF_ERROR(
      CheckRate(where + ".b_to_a_bytes_per_s", link.b_to_a_bytes_per_s));
  TB_RETURN_IF_ERROR(CheckRate(where + ".duplex_bytes_per_s",
                               link.duplex_bytes_per_s, /*is_optional=*/true));
  const double fastest =
      std::max(link.a_to_b_bytes_per_s, link.b_to_a_bytes_per_s);
  const double sum = link.a_to_b_bytes_per_s + link.b_to_a_bytes_per_s;
  const double duplex = link.duplex_bytes_per_s;
  if (duplex != 0 && (duplex < fastest || duplex > sum)) {
    return Wrong(where + ".duplex_bytes_per_s",
                 "both directions added up, from " + JsonNumber(fastest) +
                     " to " + JsonNumber(sum),
                 JsonNumber(duplex),
                 "leave it out if the directions are independent");
  }
  if (link.latency_ns < 0 || link.latency_ns > kMaxLatencyNs) {
    return Wrong(where + ".latency_ns", "nanoseconds from 0 to 1e9",
                 std::to_string(link.latency_ns));
  }
  TB_RETURN_IF_ERROR(CheckPartOfMax(where, "generation", link.generation,
                                    link.max_generation, 16));
  return CheckPartOfMax(where, "width", link.width, link.max_width, 1024);
}

Status CheckLinks(const Graph& graph) {
  TB_RETURN_IF_ERROR(CheckCount("links", graph.links.size(), kMaxLinks));
  std::map<std::string, size_t> ids;
  std::map<std::tuple<LinkType, std::string, std::string>, size_t> ends;
  const auto entry = [&](size_t i) {
    return Entry("links", i, graph.links[i].id);
  };
  for (size_t i = 0; i < graph.links.size(); ++i) {
    const Link& link = graph.links[i];
    if (link.id.empty() || link.id.size() > 128) {
      return Wrong(Entry("links", i, "") + ".id", "a name of 1 to 128 bytes",
                   Quote(link.id));
    }
    TB_RETURN_IF_ERROR(CheckLink(graph, link, entry(i)));
    if (const auto [it, is_new] = ids.emplace(link.id, i); !is_new) {
      return Wrong(entry(i) + ".id", "a name that no other link has",
                   Quote(link.id) + ", which is " + entry(it->second) + " too",
                   "rename one of them");
    }
    const auto [low, high] =
        std::minmax(NodeId(graph, link.a), NodeId(graph, link.b));
    const auto [it, is_new] = ends.emplace(std::tuple(link.type, low, high), i);
    if (!is_new) {
      return Wrong(
          entry(i),
          "one " + std::string(ToString(link.type)) + " link between " +
              Quote(low) + " and " + Quote(high),
          "a second one beside " + entry(it->second),
          "write parallel links as one, with their number as width and "
          "their rates added up");
    }
  }
  return OkStatus();
}

Status CheckGroups(const Graph& graph) {
  TB_RETURN_IF_ERROR(
      CheckCount("link_groups", graph.link_groups.size(), kMaxNodes));
  std::set<std::string> ids;
  std::map<int, std::string> group_of;
  for (size_t i = 0; i < graph.link_groups.size(); ++i) {
    const LinkGroup& group = graph.link_groups[i];
    const std::string where = Entry("link_groups", i, group.id);
    if (group.id.empty() || group.id.size() > 64) {
      return Wrong(where + ".id", "a name of 1 to 64 bytes", Quote(group.id));
    }
    if (!ids.insert(group.id).second) {
      return Wrong(where + ".id", "a name that no other group has",
                   Quote(group.id));
    }
    if (group.gpus.size() < 2) {
      return Wrong(where + ".gpus", "two GPUs or more",
                   std::to_string(group.gpus.size()),
                   "leave out a group that shares nothing");
    }
    for (const int gpu : group.gpus) {
      if (gpu < 0 || static_cast<size_t>(gpu) >= graph.gpus.size()) {
        return Wrong(where + ".gpus", "GPUs of this file",
                     "index " + std::to_string(gpu));
      }
      const auto [it, is_new] = group_of.emplace(gpu, group.id);
      if (!is_new) {
        return Wrong(
            where + ".gpus", "GPUs that no other entry of a group names",
            Quote(graph.gpus[gpu].id) + ", already in " + Quote(it->second),
            "put GPUs that share a resource into one group");
      }
    }
    TB_RETURN_IF_ERROR(
        CheckRate(where + ".h2d_bytes_per_s", group.h2d_bytes_per_s));
    TB_RETURN_IF_ERROR(
        CheckRate(where + ".d2h_bytes_per_s", group.d2h_bytes_per_s));
  }
  return OkStatus();
}

Status CheckPeerAccess(const Graph& graph) {
  const int num_gpus = static_cast<int>(graph.gpus.size());
  std::set<std::pair<int, int>> seen;
  for (size_t i = 0; i < graph.peer_access.size(); ++i) {
    const auto [a, b] = graph.peer_access[i];
    const std::string where = Entry("peer_access", i, "");
    if (a < 0 || b < 0 || a >= num_gpus || b >= num_gpus) {
      return Wrong(
          where, "GPUs of this file",
          "indices " + std::to_string(a) + " and " + std::to_string(b));
    }
    if (a == b) {
      return Wrong(where, "two different GPUs",
                   Quote(graph.gpus[a].id) + " twice");
    }
    if (!seen.insert(std::minmax(a, b)).second) {
      return Wrong(where, "each pair once",
                   Quote(graph.gpus[a].id) + " and " + Quote(graph.gpus[b].id) +
                       " again",
                   "access is mutual: list a pair in one order only");
    }
  }
  return OkStatus();
}

}  // namespace

Status Validate(const Graph& graph) {
  if (graph.name.empty() || graph.name.size() > kMaxTextBytes) {
    return Wrong("name", "1 to 1024 bytes", Quote(graph.name));
  }
  TB_RETURN_IF_ERROR(CheckNodes(graph));
  TB_RETURN_IF_ERROR(CheckGpus(graph));
  TB_RETURN_IF_ERROR(CheckLinks(graph));
  TB_RETURN_IF_ERROR(CheckGroups(graph));
  return CheckPeerAccess(graph);
}

}  // namespace turbobus::topo

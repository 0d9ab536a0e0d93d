#ifndef TURBOBUS_TOPO_GRAPH_H_
#define TURBOBUS_TOPO_GRAPH_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace turbobus::topo {

enum class NodeKind : uint8_t { kGpu = 0, kNuma = 1, kSwitch = 2 };

/// A node of the graph: the `index`-th of its kind.
struct NodeRef {
  NodeKind kind = NodeKind::kGpu;
  int index = 0;

  friend bool operator==(const NodeRef&, const NodeRef&) = default;
};

inline constexpr int kUnknownNuma = -1;

struct Gpu {
  /// The name that links use; unique among all nodes.
  std::string id;
  std::string name;
  std::string uuid;
  std::string pci_address;
  /// Index into `Graph::numa_nodes`. `kUnknownNuma` becomes the nearest one
  /// when a `Topology` is made.
  int numa_node = kUnknownNuma;
};

struct NumaNode {
  std::string id;
  /// What all transfers from and to this memory can reach together, reads and
  /// writes added up; 0: unknown, taken as no limit.
  double memory_bytes_per_s = 0;
};

enum class SwitchType : uint8_t { kPcie = 0, kNvswitch = 1 };

struct Switch {
  std::string id;
  SwitchType type = SwitchType::kPcie;
};

enum class LinkType : uint8_t { kPcie = 0, kNvlink = 1, kUpi = 2, kC2c = 3 };

/// How a link's rates became known.
enum class RateSource : uint8_t {
  kSpecified = 0,
  kEstimated = 1,
  kMeasured = 2
};

/// One physical edge. Parallel NVLinks between two nodes are one link whose
/// width is their number.
struct Link {
  std::string id;
  LinkType type = LinkType::kPcie;
  NodeRef a;
  NodeRef b;
  double a_to_b_bytes_per_s = 0;
  double b_to_a_bytes_per_s = 0;
  /// Both directions at once, added up; 0: the sum of the two.
  double duplex_bytes_per_s = 0;
  int64_t latency_ns = 0;
  /// Lanes or bricks, and protocol generation, now and at most; 0: unknown.
  int width = 0;
  int max_width = 0;
  int generation = 0;
  int max_generation = 0;
  RateSource rate_source = RateSource::kSpecified;

  /// Runs below what its ends can do: the rate is that of now.
  bool is_degraded() const {
    return width < max_width || generation < max_generation;
  }
};

/// GPUs whose own links, though separate, end in one slow resource.
struct LinkGroup {
  std::string id;
  std::vector<int> gpus;
  double h2d_bytes_per_s = 0;
  double d2h_bytes_per_s = 0;
};

/// What a topology file says, before it has been checked. Plain data; indices
/// may be wrong until `Topology::Create` has accepted it.
struct Graph {
  std::string name;
  std::string description;
  std::vector<NumaNode> numa_nodes;
  std::vector<Switch> switches;
  std::vector<Gpu> gpus;
  std::vector<Link> links;
  /// Groups known from measurement, where the tree does not show them.
  std::vector<LinkGroup> link_groups;
  /// Pairs that can read and write each other's memory. If the file says
  /// nothing: every pair that NVLink joins.
  std::vector<std::pair<int, int>> peer_access;
  bool has_peer_access_list = false;
};

/// The words of the file format.
std::string_view ToString(LinkType type);
std::string_view ToString(SwitchType type);
std::string_view ToString(RateSource source);

/// The id of a node; `node` must be in the graph.
const std::string& NodeId(const Graph& graph, NodeRef node);

}  // namespace turbobus::topo

#endif  // TURBOBUS_TOPO_GRAPH_H_

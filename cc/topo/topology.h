#ifndef TURBOBUS_TOPO_TOPOLOGY_H_
#define TURBOBUS_TOPO_TOPOLOGY_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "topo/graph.h"
#include "topo/path.h"

namespace turbobus::topo {

/// A relay pays only where the fabric carries about twice what the relay's PCIe
/// link does, so that both directions run at once (PAPERS, TurboBus, "When it
/// works"). Measured rates lie a little below the nominal factor of two.
inline constexpr double kRelayFabricFactor = 1.9;

/// Something that a path uses up: one direction of a link, both directions of a
/// half-duplex one, a NUMA node's memory, a measured link group.
struct Resource {
  std::string name;
  double bandwidth_bytes_per_s = 0;
};

/// A link as a path crosses it.
struct Hop {
  int link = 0;
  bool is_a_to_b = true;
};

enum class PeerKind : uint8_t {
  /// The GPUs reach each other's memory.
  kPeer = 0,
  /// Through a third GPU that both reach.
  kRelay = 1,
  /// Written to host memory and read from there.
  kHost = 2,
};

/// From one GPU's memory to another's.
struct PeerPath {
  int src = 0;
  int dst = 0;
  PeerKind kind = PeerKind::kPeer;
  /// kRelay: the GPU on the way. kHost: the NUMA node.
  int via = -1;
  double bandwidth_bytes_per_s = 0;
  int64_t latency_ns = 0;
  std::vector<int> links;
};

/// Everything that a scheduler or an emulating transport needs: lane i runs on
/// `paths[i]` and draws on the caps `lane_caps[i]`.
struct LanePlan {
  std::vector<Path> paths;
  std::vector<Resource> caps;
  std::vector<std::vector<int>> lane_caps;
};

struct LaneOptions {
  /// Lanes for host memory on these nodes; empty: on all of them.
  std::vector<int> numa_nodes;
  bool has_relays = true;
  /// Leaves out a cap that its lanes cannot exceed even together.
  bool only_binding_caps = true;
};

/// A machine's GPUs, memories and links, checked, with its routes computed.
///
/// Immutable, so any thread may read it; owns everything. GPU i is the i-th of
/// the file; all indices in arguments must be in range. Knows nothing of CUDA.
class Topology {
 public:
  /// INVALID_ARGUMENT, naming the field, what was expected and what came, for a
  /// graph that contradicts itself. `source` is put in front of messages.
  static StatusOr<Topology> Create(Graph graph, std::string_view source);

  /// Reads a file of the format in docs/topology.md; errors as above.
  static StatusOr<Topology> FromJson(std::string_view text,
                                     std::string_view source);

  /// A file that reads back as this topology.
  std::string ToJson() const;

  const Graph& graph() const { return graph_; }
  const std::vector<Gpu>& gpus() const { return graph_.gpus; }
  const std::vector<NumaNode>& numa_nodes() const { return graph_.numa_nodes; }
  const std::vector<Link>& links() const { return graph_.links; }

  /// Every GPU is in exactly one; a GPU with a link of its own is alone.
  const std::vector<LinkGroup>& link_groups() const { return link_groups_; }
  int LinkGroupOf(int gpu) const { return group_of_gpu_[gpu]; }

  bool HasPeerAccess(int a, int b) const;

  /// Whether `relay` may lend its link to `gpu`: peer access over a fabric
  /// that is fast enough and does not share links with the relay's way to the
  /// host.
  bool CanRelay(int gpu, int relay) const;

  /// The direct path first, then a path through each GPU whose link adds to
  /// what the direct one carries, fastest first.
  std::vector<Path> Paths(int gpu, Direction direction, int numa_node) const;
  /// To and from the GPU's own NUMA node.
  std::vector<Path> Paths(int gpu, Direction direction) const;

  /// Every way between two GPUs' memories, best first; never empty.
  std::vector<PeerPath> PeerPaths(int src, int dst) const;

  /// The links of a path in order, with the direction in which it crosses them.
  std::vector<Hop> Hops(const Path& path) const;
  std::vector<Hop> Hops(const PeerPath& path) const;

  const std::vector<Resource>& resources() const { return resources_; }
  /// Indices into `resources()` of all that a path uses, ascending. A path
  /// that crosses a resource twice names it twice.
  std::vector<int> ResourcesOf(const Path& path) const;
  std::vector<int> ResourcesOf(const PeerPath& path) const;

  /// What each path carries if all are busy and share fairly (progressive
  /// filling over the resources; `Rates({p})` is what `p` does alone).
  std::vector<double> Rates(const std::vector<Path>& paths) const;

  /// What a GPU reaches over all its paths while every other GPU is idle.
  double PooledBandwidth(int gpu, Direction direction) const;

  /// Lanes for every GPU and both directions.
  LanePlan Lanes(const LaneOptions& options = {}) const;

 private:
  /// A way between two nodes, as hops from its source.
  struct Route {
    std::vector<Hop> hops;
    bool is_found = false;
  };

  Topology() = default;

  Status ComputeRoutes(std::string_view source);
  void ComputePeers();
  void ComputeResources();
  void ComputeLinkGroups();

  Route FindRoute(NodeRef from, NodeRef to, bool nvlink_only) const;
  const Route& HostRoute(int numa_node, int gpu) const;
  const Route& PeerRoute(int a, int b) const;
  static void Append(const Route& route, bool is_reversed,
                     std::vector<Hop>& hops);
  std::vector<Hop> HopsFrom(NodeRef source,
                            const std::vector<int>& links) const;
  void Measure(const std::vector<Hop>& hops, double& bandwidth_bytes_per_s,
               int64_t& latency_ns) const;
  Path MakePath(int gpu, int relay, Direction direction, int numa_node) const;
  void AddLinkResources(const std::vector<Hop>& hops,
                        std::vector<int>& out) const;
  void AddGroupResource(int gpu, Direction direction,
                        std::vector<int>& out) const;
  std::vector<double> FairRates(
      const std::vector<std::vector<int>>& uses) const;

  Graph graph_;
  std::vector<LinkGroup> link_groups_;
  std::vector<int> group_of_gpu_;
  std::vector<Route> host_routes_;  // [numa_node][gpu]
  std::vector<Route> peer_routes_;  // [a][b]; not found: no peer access
  std::vector<Resource> resources_;
  // Indices into `resources_`; -1: no limit.
  std::vector<int> link_resource_;    // [link][is_a_to_b]
  std::vector<int> duplex_resource_;  // [link]
  std::vector<int> memory_resource_;  // [numa_node]
  std::vector<int> group_resource_;   // [gpu][direction]
};

/// The bytes a second that one message of `size_bytes` achieves alone on a path
/// of this rate and latency: the score by which paths are compared.
double Score(double bandwidth_bytes_per_s, int64_t latency_ns,
             int64_t size_bytes);

}  // namespace turbobus::topo

#endif  // TURBOBUS_TOPO_TOPOLOGY_H_

#ifndef TURBOBUS_TOPO_PATH_H_
#define TURBOBUS_TOPO_PATH_H_

#include <cstdint>
#include <vector>

namespace turbobus::topo {

enum class Direction : uint8_t { kH2d = 0, kD2h = 1 };

inline constexpr int kNoRelay = -1;

/// Ordered links between one GPU's memory and host memory: direct, or through
/// one relay GPU (single hop: PAPERS, TurboBus, "Idea").
struct Path {
  int gpu = 0;
  int relay = kNoRelay;
  int numa_node = 0;
  Direction direction = Direction::kH2d;
  /// Of the slowest link on the way.
  double bandwidth_bytes_per_s = 0;
  int64_t latency_ns = 0;
  /// Indices into `Topology::links()`, from the source to the destination.
  std::vector<int> links;
  /// Paths of one link group share a slow resource (a switch uplink): together
  /// they are no faster than the group.
  int link_group = 0;

  bool is_relay() const { return relay != kNoRelay; }
};

}  // namespace turbobus::topo

#endif  // TURBOBUS_TOPO_PATH_H_

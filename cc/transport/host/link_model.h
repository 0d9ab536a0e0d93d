#ifndef TURBOBUS_TRANSPORT_HOST_LINK_MODEL_H_
#define TURBOBUS_TRANSPORT_HOST_LINK_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "topo/path.h"

namespace turbobus::transport::host {

/// One copy on a lane's way: memory to memory, or memory to staging buffer.
struct HopModel {
  /// Indices into `LinkModel::rates_bytes_per_s`; one named twice counts twice.
  std::vector<int> resources{};
  /// From turning to a block until its first byte moves. The links are free for
  /// others meanwhile.
  int64_t latency_ns = 0;
};

struct LaneModel {
  /// One hop, or two with a staging buffer between them.
  std::vector<HopModel> hops{};
  /// The staging ring between the hops, shared by all lanes that name it; -1
  /// for lanes of one hop.
  int staging = -1;
  /// Blocks a hop works on at once. A real copy engine does one after another.
  int num_parallel = 1;
};

/// What the lanes of a host transport run on.
struct LinkModel {
  std::vector<double> rates_bytes_per_s{};
  std::vector<LaneModel> lanes{};
  int num_stagings = 0;
  /// Staging buffers of each ring: one fills while the other drains.
  int num_slots = 2;

  /// INVALID_ARGUMENT, naming the lane and field, if an index or rate is wrong.
  Status Validate() const;
};

/// Links without rates: every lane copies as fast as memory allows, straight to
/// the destination.
LinkModel UnlimitedLinks(int num_lanes);

}  // namespace turbobus::transport::host

#endif  // TURBOBUS_TRANSPORT_HOST_LINK_MODEL_H_

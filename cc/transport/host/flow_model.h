#ifndef TURBOBUS_TRANSPORT_HOST_FLOW_MODEL_H_
#define TURBOBUS_TRANSPORT_HOST_FLOW_MODEL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

namespace turbobus::transport::host {

using FlowId = int64_t;

/// Bytes that stream like a fluid over shared resources (one direction of a
/// link, a switch uplink, a NUMA node's memory).
///
/// Every flow runs at its max-min fair rate: the resources it crosses are
/// shared evenly among their flows, and what a flow held back elsewhere leaves
/// over goes to the others. Pure: time is what the caller says (never
/// decreasing), so the same calls give the same ends. Not thread-safe.
class FlowModel {
 public:
  explicit FlowModel(std::vector<double> rates_bytes_per_s);

  /// Starts a flow of `size_bytes`, never faster than `max_bytes_per_s`. It
  /// uses a resource as often as `resources` names it. A flow without resources
  /// and without a limit ends at once.
  FlowId Start(std::span<const int> resources, int64_t size_bytes,
               double max_bytes_per_s, int64_t now_ns);

  void SetMaxRate(FlowId flow, double max_bytes_per_s, int64_t now_ns);

  /// Takes a flow out, whether it has ended or not.
  void Remove(FlowId flow, int64_t now_ns);

  struct End {
    FlowId flow = 0;
    int64_t time_ns = 0;
  };
  /// The flow that ends next if nothing changes before; of several, the oldest.
  /// It stays (at no bytes left) until it is removed.
  std::optional<End> NextEnd() const;

  /// The present rate; 0 for an unknown flow.
  double RateOf(FlowId flow) const;

  int num_flows() const { return static_cast<int>(flows_.size()); }

 private:
  struct Flow {
    std::vector<int> resources{};
    double max_bytes_per_s = 0;
    double left_bytes = 0;
    double bytes_per_s = 0;
    int64_t end_ns = 0;
  };

  void AdvanceTo(int64_t now_ns);
  void ShareOut();

  const std::vector<double> rates_;
  std::map<FlowId, Flow> flows_;
  FlowId next_id_ = 1;
  int64_t now_ns_ = 0;
};

}  // namespace turbobus::transport::host

#endif  // TURBOBUS_TRANSPORT_HOST_FLOW_MODEL_H_

#include "transport/host/link_model.h"

#include <cmath>
#include <string>

namespace turbobus::transport::host {
namespace {

Status ValidateLane(const LinkModel& model, const LaneModel& lane) {
  const int num_hops = static_cast<int>(lane.hops.size());
  if (num_hops != 1 && num_hops != 2) {
    return InvalidArgument(
        "hops: expected 1 (direct) or 2 (through a relay), got " +
        std::to_string(num_hops));
  }
  const bool has_staging =
      lane.staging >= 0 && lane.staging < model.num_stagings;
  if (has_staging != (num_hops == 2)) {
    return InvalidArgument(
        "staging: expected a ring for two hops and -1 for one, got " +
        std::to_string(lane.staging) + " of " +
        std::to_string(model.num_stagings) + " for " +
        std::to_string(num_hops));
  }
  if (lane.num_parallel < 1) {
    return InvalidArgument("num_parallel: expected at least 1, got " +
                           std::to_string(lane.num_parallel));
  }
  for (const HopModel& hop : lane.hops) {
    if (hop.latency_ns < 0) {
      return InvalidArgument("latency_ns: expected at least 0, got " +
                             std::to_string(hop.latency_ns));
    }
    for (const int resource : hop.resources) {
      if (resource < 0 || resource >= std::ssize(model.rates_bytes_per_s)) {
        return InvalidArgument("resources: no resource " +
                               std::to_string(resource) + "; there are " +
                               std::to_string(model.rates_bytes_per_s.size()));
      }
    }
  }
  return OkStatus();
}

}  // namespace

Status LinkModel::Validate() const {
  for (size_t i = 0; i < rates_bytes_per_s.size(); ++i) {
    if (!(rates_bytes_per_s[i] > 0)) {
      return InvalidArgument("rates_bytes_per_s[" + std::to_string(i) +
                             "]: expected a positive rate, got " +
                             std::to_string(rates_bytes_per_s[i]));
    }
  }
  if (num_slots < 1) {
    return InvalidArgument("num_slots: expected at least 1, got " +
                           std::to_string(num_slots));
  }
  for (size_t i = 0; i < lanes.size(); ++i) {
    TB_RETURN_IF_ERROR(
        ValidateLane(*this, lanes[i]).WithContext("lane " + std::to_string(i)));
  }
  return OkStatus();
}

LinkModel UnlimitedLinks(int num_lanes) {
  // Two blocks at once, so that no copying thread idles between blocks.
  return {.lanes = std::vector<LaneModel>(
              num_lanes, LaneModel{.hops = {HopModel{}}, .num_parallel = 2})};
}

}  // namespace turbobus::transport::host

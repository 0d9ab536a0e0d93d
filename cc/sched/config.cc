#include "sched/config.h"

#include <utility>

namespace turbobus::sched {

Config ConfigFor(const topo::LanePlan& plan, Config base) {
  Config config = std::move(base);
  config.lanes.clear();
  config.caps.clear();
  for (size_t i = 0; i < plan.paths.size(); ++i) {
    config.lanes.push_back({.path = plan.paths[i],
                            .window_bytes = 2 * config.block_bytes,
                            .caps = plan.lane_caps[i]});
  }
  for (const topo::Resource& cap : plan.caps) {
    config.caps.push_back(
        {.name = cap.name, .bandwidth_bytes_per_s = cap.bandwidth_bytes_per_s});
  }
  return config;
}

}  // namespace turbobus::sched

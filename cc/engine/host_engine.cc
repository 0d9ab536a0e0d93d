#include "engine/host_engine.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "transport/host/topology_links.h"

namespace turbobus::engine {
namespace {

using transport::host::HostTransport;
using transport::host::LinkModel;

// The control thread needs a moment to issue the next block; a lane must not
// wait for it. More would only queue behind a lane that turns out to be slow.
constexpr int kWindowBlocks = 2;
constexpr int kChunkBlocks = 8;
// At memory speed the topology's rates say nothing about when a block is due.
constexpr double kNeverLate = 1e12;

Status Check(const topo::Topology& topology, const HostEngineOptions& options) {
  if (topology.gpus().empty()) {
    return InvalidArgument("topology: expected at least one GPU, got " +
                           topology.graph().name + " with none");
  }
  if (!(options.rate_scale > 0) || !std::isfinite(options.rate_scale)) {
    return InvalidArgument("rate_scale: expected a positive number, got " +
                           std::to_string(options.rate_scale));
  }
  if (options.block_bytes < 4096) {
    return InvalidArgument("block_bytes: expected at least 4096, got " +
                           std::to_string(options.block_bytes));
  }
  if (options.chunk_bytes != 0 && options.chunk_bytes < options.block_bytes) {
    return InvalidArgument("chunk_bytes: expected at least block_bytes (" +
                           std::to_string(options.block_bytes) +
                           ") or 0 for the default, got " +
                           std::to_string(options.chunk_bytes));
  }
  if (options.trace_capacity < 0) {
    return InvalidArgument("trace_capacity: expected at least 0, got " +
                           std::to_string(options.trace_capacity));
  }
  if (options.num_threads < 0) {
    return InvalidArgument("num_threads: expected at least 0, got " +
                           std::to_string(options.num_threads));
  }
  return OkStatus();
}

topo::LanePlan LanesToNearestMemory(const topo::Topology& topology,
                                    bool is_pooled) {
  topo::LaneOptions lane_options;
  lane_options.has_relays = is_pooled;
  topo::LanePlan all = topology.Lanes(lane_options);
  topo::LanePlan nearest;
  nearest.caps = std::move(all.caps);
  for (size_t i = 0; i < all.paths.size(); ++i) {
    if (all.paths[i].numa_node != topology.gpus()[all.paths[i].gpu].numa_node) {
      continue;
    }
    nearest.paths.push_back(std::move(all.paths[i]));
    nearest.lane_caps.push_back(std::move(all.lane_caps[i]));
  }
  return nearest;
}

Labels MakeLabels(const topo::Topology& topology,
                  const std::vector<topo::Path>& paths, double rate_scale) {
  Labels labels;
  const topo::Graph& graph = topology.graph();
  for (const topo::Link& link : graph.links) {
    const std::string& a = topo::NodeId(graph, link.a);
    const std::string& b = topo::NodeId(graph, link.b);
    labels.links.push_back(
        {.name = link.id + " " + a + ">" + b,
         .bandwidth_bytes_per_s = link.a_to_b_bytes_per_s * rate_scale});
    labels.links.push_back(
        {.name = link.id + " " + b + ">" + a,
         .bandwidth_bytes_per_s = link.b_to_a_bytes_per_s * rate_scale});
  }
  for (const topo::Path& path : paths) {
    std::string name =
        graph.gpus[path.gpu].id +
        (path.direction == topo::Direction::kH2d ? " h2d" : " d2h");
    if (path.is_relay()) name += " via " + graph.gpus[path.relay].id;
    labels.lanes.push_back(std::move(name));
    std::vector<std::vector<int>> hops;
    for (const auto& hop : transport::host::SplitAtRelay(topology, path)) {
      std::vector<int>& links = hops.emplace_back();
      for (const topo::Hop& link : hop) {
        links.push_back(2 * link.link + (link.is_a_to_b ? 0 : 1));
      }
    }
    labels.lane_links.push_back(std::move(hops));
  }
  return labels;
}

}  // namespace

StatusOr<HostEngine> CreateHostEngine(const topo::Topology& topology,
                                      const HostEngineOptions& options) {
  TB_RETURN_IF_ERROR(Check(topology, options));
  topo::LanePlan plan = LanesToNearestMemory(topology, options.is_pooled);
  const int num_lanes = static_cast<int>(plan.paths.size());
  LinkModel links = options.is_emulated
                        ? transport::host::EmulatedLinks(topology, plan.paths,
                                                         options.rate_scale)
                        : transport::host::UnlimitedLinks(num_lanes);
  Options engine_options{
      .labels = MakeLabels(topology, plan.paths, options.rate_scale),
      .trace_capacity = options.trace_capacity,
      .live_kind = options.is_emulated ? LivePage::Kind::kEmulated
                                       : LivePage::Kind::kHost};
  sched::Config config;
  config.mode = options.mode;
  if (!options.is_emulated) config.late_factor = kNeverLate;
  config.block_bytes = options.block_bytes;
  config.chunk_bytes = options.chunk_bytes != 0
                           ? options.chunk_bytes
                           : kChunkBlocks * options.block_bytes;
  for (topo::Path& path : plan.paths) {
    path.bandwidth_bytes_per_s *= options.rate_scale;
  }
  for (const topo::Resource& cap : plan.caps) {
    sched::CapSpec spec;
    spec.name = cap.name;
    spec.bandwidth_bytes_per_s = cap.bandwidth_bytes_per_s * options.rate_scale;
    config.caps.push_back(std::move(spec));
  }
  for (int i = 0; i < num_lanes; ++i) {
    sched::LaneSpec lane;
    lane.path = plan.paths[i];
    lane.window_bytes = kWindowBlocks * options.block_bytes;
    lane.caps = plan.lane_caps[i];
    config.lanes.push_back(std::move(lane));
  }
  TB_ASSIGN_OR_RETURN(
      std::unique_ptr<HostTransport> transport,
      HostTransport::Create(std::move(plan.paths), std::move(links),
                            options.num_threads));
  HostEngine result;
  result.transport = transport.get();
  TB_ASSIGN_OR_RETURN(result.engine,
                      Engine::Create(std::move(config), std::move(transport),
                                     std::move(engine_options)));
  return result;
}

}  // namespace turbobus::engine

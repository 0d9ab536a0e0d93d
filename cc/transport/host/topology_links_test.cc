#include "transport/host/topology_links.h"

#include <gtest/gtest.h>

#include <numeric>

#include "transport/host/flow_model.h"

namespace turbobus::transport::host {
namespace {

constexpr char kTwoGpus[] = R"({
  "format": "jax_turbobus/topology", "version": 1, "name": "two",
  "numa_nodes": [{"id": "numa0", "memory_bytes_per_s": 1500}],
  "gpus": [{"id": "gpu0", "numa_node": "numa0"}, {"id": "gpu1", "numa_node": "numa0"}],
  "links": [
    {"id": "pcie0", "type": "pcie", "a": "numa0", "b": "gpu0",
     "a_to_b_bytes_per_s": 1000, "b_to_a_bytes_per_s": 900, "latency_ns": 5},
    {"id": "pcie1", "type": "pcie", "a": "numa0", "b": "gpu1",
     "a_to_b_bytes_per_s": 1000, "b_to_a_bytes_per_s": 900, "latency_ns": 6},
    {"id": "nvlink", "type": "nvlink", "a": "gpu0", "b": "gpu1",
     "a_to_b_bytes_per_s": 8000, "b_to_a_bytes_per_s": 7000, "latency_ns": 7}]
})";

topo::Topology TwoGpus() {
  auto topology = topo::Topology::FromJson(kTwoGpus, "test");
  EXPECT_TRUE(topology.ok()) << topology.status();
  return std::move(topology).value();
}

double RateAlone(const LinkModel& model, const HopModel& hop) {
  FlowModel flows(model.rates_bytes_per_s);
  return flows.RateOf(flows.Start(hop.resources, 1000, 1e18, 0));
}

TEST(TopologyLinksTest, HopsFollowTheDirectionOfTheTransfer) {
  const topo::Topology topology = TwoGpus();
  std::vector<topo::Path> paths = topology.Paths(0, topo::Direction::kH2d);
  for (const topo::Path& path : topology.Paths(0, topo::Direction::kD2h)) {
    paths.push_back(path);
  }
  ASSERT_EQ(paths.size(), 4U);
  const LinkModel model = EmulatedLinks(topology, paths, 0.5);
  ASSERT_TRUE(model.Validate().ok()) << model.Validate();

  EXPECT_EQ(model.lanes[0].hops.size(), 1U);
  EXPECT_DOUBLE_EQ(RateAlone(model, model.lanes[0].hops[0]), 500);
  EXPECT_EQ(model.lanes[0].hops[0].latency_ns, 5);

  // Host to relay over pcie1, then from gpu1 to gpu0.
  ASSERT_EQ(model.lanes[1].hops.size(), 2U);
  EXPECT_DOUBLE_EQ(RateAlone(model, model.lanes[1].hops[0]), 500);
  EXPECT_EQ(model.lanes[1].hops[0].latency_ns, 6);
  EXPECT_DOUBLE_EQ(RateAlone(model, model.lanes[1].hops[1]), 3500);
  EXPECT_EQ(model.lanes[1].hops[1].latency_ns, 7);

  // And back: gpu0 to gpu1, then to the host.
  EXPECT_DOUBLE_EQ(RateAlone(model, model.lanes[3].hops[0]), 4000);
  EXPECT_DOUBLE_EQ(RateAlone(model, model.lanes[3].hops[1]), 450);

  EXPECT_NE(model.lanes[1].staging, model.lanes[3].staging);
  EXPECT_EQ(model.num_stagings, 2);
}

TEST(TopologyLinksTest, TheMemoryThatLanesShareHoldsThemTogether) {
  const topo::Topology topology = TwoGpus();
  const auto paths = topology.Paths(0, topo::Direction::kH2d);
  const LinkModel model = EmulatedLinks(topology, paths, 1);
  FlowModel flows(model.rates_bytes_per_s);
  const FlowId direct =
      flows.Start(model.lanes[0].hops[0].resources, 9, 1e18, 0);
  const FlowId relayed =
      flows.Start(model.lanes[1].hops[0].resources, 9, 1e18, 0);
  EXPECT_DOUBLE_EQ(flows.RateOf(direct) + flows.RateOf(relayed), 1500);
}

TEST(TopologyLinksTest, APathIsSplitWhereTheRelayIs) {
  const topo::Topology topology = TwoGpus();
  const auto down =
      SplitAtRelay(topology, topology.Paths(0, topo::Direction::kH2d)[1]);
  ASSERT_EQ(down.size(), 2U);
  EXPECT_EQ(topology.links()[down[0].front().link].id, "pcie1");
  EXPECT_TRUE(down[0].front().is_a_to_b);
  EXPECT_EQ(topology.links()[down[1].front().link].id, "nvlink");
  EXPECT_FALSE(down[1].front().is_a_to_b);
  const auto up =
      SplitAtRelay(topology, topology.Paths(0, topo::Direction::kD2h)[1]);
  EXPECT_EQ(topology.links()[up[0].front().link].id, "nvlink");
  EXPECT_TRUE(up[0].front().is_a_to_b);
}

}  // namespace
}  // namespace turbobus::transport::host

#include "topo/topology.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

namespace turbobus::topo {
namespace {

constexpr NodeRef GpuRef(int i) { return {NodeKind::kGpu, i}; }
constexpr NodeRef NumaRef(int i) { return {NodeKind::kNuma, i}; }
constexpr NodeRef SwitchRef(int i) { return {NodeKind::kSwitch, i}; }

Link MakeLink(std::string id, LinkType type, NodeRef a, NodeRef b, double rate,
              int64_t latency_ns = 0) {
  Link link;
  link.id = std::move(id);
  link.type = type;
  link.a = a;
  link.b = b;
  link.a_to_b_bytes_per_s = rate;
  link.b_to_a_bytes_per_s = rate;
  link.latency_ns = latency_ns;
  return link;
}

/// `num_gpus` GPUs with a PCIe link of 10 each to numa0.
Graph Star(int num_gpus) {
  Graph graph;
  graph.name = "star";
  graph.numa_nodes.push_back({"numa0", 0});
  for (int i = 0; i < num_gpus; ++i) {
    const std::string n = std::to_string(i);
    graph.gpus.push_back({"gpu" + n, "", "", "", kUnknownNuma});
    graph.links.push_back(
        MakeLink("pcie" + n, LinkType::kPcie, NumaRef(0), GpuRef(i), 10, 5));
  }
  return graph;
}

void AddNvlink(Graph& graph, int a, int b, double rate) {
  graph.links.push_back(MakeLink("nv" + std::to_string(a) + std::to_string(b),
                                 LinkType::kNvlink, GpuRef(a), GpuRef(b), rate,
                                 3));
}

/// Four GPUs behind two switches whose uplinks carry as much as one GPU's link.
Graph TwoSwitches() {
  Graph graph = Star(4);
  graph.switches = {{"sw0", SwitchType::kPcie}, {"sw1", SwitchType::kPcie}};
  for (int i = 0; i < 4; ++i) graph.links[i].a = SwitchRef(i / 2);
  for (int s = 0; s < 2; ++s) {
    graph.links.push_back(MakeLink("uplink" + std::to_string(s),
                                   LinkType::kPcie, NumaRef(0), SwitchRef(s),
                                   10));
  }
  for (int a = 0; a < 4; ++a) {
    for (int b = a + 1; b < 4; ++b) AddNvlink(graph, a, b, 20);
  }
  return graph;
}

Topology MustCreate(Graph graph) {
  StatusOr<Topology> topology = Topology::Create(std::move(graph), "test");
  EXPECT_TRUE(topology.ok()) << topology.status();
  return std::move(topology).value();
}

std::string ErrorOf(Graph graph) {
  const StatusOr<Topology> topology =
      Topology::Create(std::move(graph), "test");
  if (topology.ok()) return "";
  EXPECT_EQ(topology.status().code(), StatusCode::kInvalidArgument);
  return topology.status().message();
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

TEST(TopologyTest, DirectPathCrossesItsLinksInOrderBothWays) {
  Graph graph = TwoSwitches();
  graph.links[0].a_to_b_bytes_per_s = 7;  // sw0 -> gpu0
  graph.links[0].b_to_a_bytes_per_s = 8;
  const Topology topology = MustCreate(std::move(graph));
  const Path h2d = topology.Paths(0, Direction::kH2d)[0];
  EXPECT_EQ(h2d.links, (std::vector<int>{4, 0}));
  EXPECT_EQ(h2d.bandwidth_bytes_per_s, 7);
  EXPECT_FALSE(h2d.is_relay());
  const Path d2h = topology.Paths(0, Direction::kD2h)[0];
  EXPECT_EQ(d2h.links, (std::vector<int>{0, 4}));
  EXPECT_EQ(d2h.bandwidth_bytes_per_s, 8);
  EXPECT_TRUE(topology.Hops(h2d)[0].is_a_to_b);
  EXPECT_FALSE(topology.Hops(d2h)[0].is_a_to_b);
  EXPECT_EQ(h2d.latency_ns, 5);
}

TEST(TopologyTest, RelayPathGoesThroughTheRelaysLinkAndTheFabric) {
  Graph graph = Star(2);
  AddNvlink(graph, 0, 1, 20);
  const Topology topology = MustCreate(std::move(graph));
  const std::vector<Path> h2d = topology.Paths(0, Direction::kH2d);
  ASSERT_EQ(h2d.size(), 2u);
  EXPECT_EQ(h2d[1].relay, 1);
  EXPECT_EQ(h2d[1].links, (std::vector<int>{1, 2}));
  EXPECT_EQ(h2d[1].latency_ns, 8);
  const std::vector<Path> d2h = topology.Paths(1, Direction::kD2h);
  ASSERT_EQ(d2h.size(), 2u);
  EXPECT_EQ(d2h[1].relay, 0);
  EXPECT_EQ(d2h[1].links, (std::vector<int>{2, 0}));
}

TEST(TopologyTest, ASlowFabricDoesNotRelay) {
  Graph fast = Star(2);
  AddNvlink(fast, 0, 1, 19);
  EXPECT_TRUE(MustCreate(std::move(fast)).CanRelay(0, 1));
  Graph slow = Star(2);
  AddNvlink(slow, 0, 1, 18.9);
  const Topology topology = MustCreate(std::move(slow));
  EXPECT_FALSE(topology.CanRelay(0, 1));
  EXPECT_EQ(topology.Paths(0, Direction::kH2d).size(), 1u);
}

TEST(TopologyTest, PeerAccessOverPcieDoesNotRelay) {
  Graph graph = Star(2);
  graph.has_peer_access_list = true;
  graph.peer_access = {{1, 0}};
  const Topology topology = MustCreate(std::move(graph));
  EXPECT_TRUE(topology.HasPeerAccess(0, 1));
  EXPECT_FALSE(topology.CanRelay(0, 1));
}

TEST(TopologyTest, AnEmptyPeerAccessListOverrulesNvlink) {
  Graph graph = Star(2);
  AddNvlink(graph, 0, 1, 20);
  graph.has_peer_access_list = true;
  const Topology topology = MustCreate(std::move(graph));
  EXPECT_FALSE(topology.HasPeerAccess(0, 1));
  EXPECT_EQ(topology.PeerPaths(0, 1)[0].kind, PeerKind::kHost);
}

TEST(TopologyTest, GpusBehindOneSwitchAreOneGroupAndDoNotRelayForEachOther) {
  const Topology topology = MustCreate(TwoSwitches());
  ASSERT_EQ(topology.link_groups().size(), 2u);
  EXPECT_EQ(topology.link_groups()[0].gpus, (std::vector<int>{0, 1}));
  EXPECT_EQ(topology.link_groups()[0].h2d_bytes_per_s, 10);
  EXPECT_EQ(topology.LinkGroupOf(3), 1);
  const std::vector<Path> paths = topology.Paths(0, Direction::kH2d);
  ASSERT_EQ(paths.size(), 3u);
  EXPECT_EQ(paths[1].relay, 2);
  EXPECT_EQ(paths[2].relay, 3);
  EXPECT_EQ(paths[1].link_group, 1);
  // Two relays behind one uplink add one link, not two.
  EXPECT_DOUBLE_EQ(topology.PooledBandwidth(0, Direction::kH2d), 20);
}

TEST(TopologyTest, AWideUplinkLeavesItsGpusIndependent) {
  Graph graph = TwoSwitches();
  for (int uplink : {4, 5}) {
    graph.links[uplink].a_to_b_bytes_per_s = 20;
    graph.links[uplink].b_to_a_bytes_per_s = 20;
  }
  const Topology topology = MustCreate(std::move(graph));
  EXPECT_EQ(topology.link_groups().size(), 4u);
  EXPECT_DOUBLE_EQ(topology.PooledBandwidth(0, Direction::kH2d), 40);
}

TEST(TopologyTest, AMeasuredGroupStandsInForAHiddenSwitch) {
  Graph graph = Star(3);
  AddNvlink(graph, 0, 1, 20);
  AddNvlink(graph, 0, 2, 20);
  graph.link_groups.push_back({"measured", {0, 1}, 11, 12});
  const Topology topology = MustCreate(std::move(graph));
  ASSERT_EQ(topology.link_groups().size(), 2u);
  EXPECT_EQ(topology.link_groups()[0].id, "measured");
  EXPECT_EQ(topology.link_groups()[0].h2d_bytes_per_s, 11);
  EXPECT_EQ(topology.link_groups()[0].d2h_bytes_per_s, 12);
  const std::vector<Path> h2d = topology.Paths(0, Direction::kH2d);
  ASSERT_EQ(h2d.size(), 3u) << "11 of 10 is still a gain";
  const std::vector<double> both = topology.Rates({h2d[0], h2d[2]});
  EXPECT_DOUBLE_EQ(both[0] + both[1], h2d[2].relay == 1 ? 11 : 20);
}

TEST(TopologyTest, PathsFromTheOtherSocketShareItsLink) {
  Graph graph = Star(2);
  graph.numa_nodes.push_back({"numa1", 0});
  graph.links[1].a = NumaRef(1);
  graph.links.push_back(
      MakeLink("upi", LinkType::kUpi, NumaRef(0), NumaRef(1), 6, 1));
  const Topology topology = MustCreate(std::move(graph));
  EXPECT_EQ(topology.gpus()[0].numa_node, 0);
  EXPECT_EQ(topology.gpus()[1].numa_node, 1);
  const Path remote = topology.Paths(0, Direction::kH2d, 1)[0];
  EXPECT_EQ(remote.links, (std::vector<int>{2, 0}));
  EXPECT_EQ(remote.numa_node, 1);
  EXPECT_EQ(remote.bandwidth_bytes_per_s, 6);
  EXPECT_EQ(topology.Paths(0, Direction::kH2d)[0].bandwidth_bytes_per_s, 10);
}

TEST(TopologyTest, HalfDuplexLimitsBothDirectionsTogether) {
  Graph graph = Star(1);
  graph.links[0].duplex_bytes_per_s = 16;
  const Topology topology = MustCreate(std::move(graph));
  const Path h2d = topology.Paths(0, Direction::kH2d)[0];
  const Path d2h = topology.Paths(0, Direction::kD2h)[0];
  EXPECT_EQ(topology.Rates({h2d}), (std::vector<double>{10}));
  EXPECT_EQ(topology.Rates({h2d, d2h}), (std::vector<double>{8, 8}));
}

TEST(TopologyTest, FairRatesFillEachResourceAndNoMore) {
  Graph graph = Star(3);
  graph.numa_nodes[0].memory_bytes_per_s = 18;
  graph.links[2].a_to_b_bytes_per_s = 2;
  const Topology topology = MustCreate(std::move(graph));
  std::vector<Path> paths;
  for (int gpu = 0; gpu < 3; ++gpu) {
    paths.push_back(topology.Paths(gpu, Direction::kH2d)[0]);
  }
  // The slow one keeps its 2, the others share what memory has left.
  EXPECT_EQ(topology.Rates(paths), (std::vector<double>{8, 8, 2}));
}

TEST(TopologyTest, PeerPathsListEveryWayBestFirst) {
  Graph graph = Star(3);
  graph.numa_nodes[0].memory_bytes_per_s = 12;
  AddNvlink(graph, 0, 1, 20);
  AddNvlink(graph, 1, 2, 40);
  AddNvlink(graph, 0, 2, 40);
  const std::vector<PeerPath> paths =
      MustCreate(std::move(graph)).PeerPaths(0, 1);
  ASSERT_EQ(paths.size(), 3u);
  EXPECT_EQ(paths[0].kind, PeerKind::kRelay);
  EXPECT_EQ(paths[0].via, 2);
  EXPECT_EQ(paths[0].bandwidth_bytes_per_s, 40);
  EXPECT_EQ(paths[1].kind, PeerKind::kPeer);
  EXPECT_EQ(paths[1].latency_ns, 3);
  EXPECT_EQ(paths[2].kind, PeerKind::kHost);
  // Memory is written and read: 12 carries 6.
  EXPECT_EQ(paths[2].bandwidth_bytes_per_s, 6);
  EXPECT_EQ(paths[2].links, (std::vector<int>{0, 1}));
}

TEST(TopologyTest, LanesCoverEveryGpuDirectionAndNodeAndNameTheirCaps) {
  const Topology topology = MustCreate(TwoSwitches());
  const LanePlan plan = topology.Lanes();
  ASSERT_EQ(plan.paths.size(), 4u * 2 * 3);
  ASSERT_EQ(plan.lane_caps.size(), plan.paths.size());
  for (size_t lane = 0; lane < plan.paths.size(); ++lane) {
    // Each lane draws at least on its lender's link and uplink, which others
    // use.
    EXPECT_GE(plan.lane_caps[lane].size(), 2u);
    for (const int cap : plan.lane_caps[lane]) {
      ASSERT_LT(static_cast<size_t>(cap), plan.caps.size());
    }
  }
  LaneOptions direct_only;
  direct_only.has_relays = false;
  EXPECT_EQ(topology.Lanes(direct_only).paths.size(), 8u);
}

TEST(TopologyTest, CapsThatCannotBindAreLeftOutUnlessAskedFor) {
  const Topology topology = MustCreate(Star(2));
  EXPECT_TRUE(topology.Lanes().caps.empty());
  LaneOptions all;
  all.only_binding_caps = false;
  EXPECT_EQ(topology.Lanes(all).caps.size(), 4u);
}

TEST(TopologyTest, ScoreFavoursLatencyForSmallAndBandwidthForLargeMessages) {
  EXPECT_DOUBLE_EQ(Score(1e9, 0, 1 << 20), 1e9);
  EXPECT_GT(Score(1e9, 1000, 1024), Score(10e9, 100000, 1024));
  EXPECT_LT(Score(1e9, 1000, 1 << 30), Score(10e9, 100000, 1 << 30));
  EXPECT_EQ(Score(1e9, 0, 0), 0);
}

TEST(TopologyTest, AMachineWithoutGpusHasNoLanes) {
  const Topology topology = MustCreate(Star(0));
  EXPECT_TRUE(topology.link_groups().empty());
  EXPECT_TRUE(topology.Lanes().paths.empty());
}

TEST(TopologyTest, ContradictionsNameTheFieldAndWhatCame) {
  Graph graph = Star(2);
  graph.links[1].a_to_b_bytes_per_s = -1;
  EXPECT_HAS(ErrorOf(graph),
             "links[1] (\"pcie1\").a_to_b_bytes_per_s: expected bytes");
  EXPECT_HAS(ErrorOf(graph), "got -1");
  graph.links[1].a_to_b_bytes_per_s = std::numeric_limits<double>::quiet_NaN();
  EXPECT_HAS(ErrorOf(graph), "not finite");
  graph = Star(2);
  graph.links.push_back(graph.links[0]);
  graph.links[2].id = "again";
  std::swap(graph.links[2].a, graph.links[2].b);
  EXPECT_HAS(ErrorOf(graph), "one pcie link between \"gpu0\" and \"numa0\"");
  graph = Star(2);
  graph.links.pop_back();
  EXPECT_HAS(ErrorOf(graph),
             "gpus[1] (\"gpu1\"): expected a way to host memory");
  graph = Star(2);
  graph.links[0].b = GpuRef(7);
  EXPECT_HAS(ErrorOf(graph), "links[0] (\"pcie0\").b: expected a node");
  graph = Star(2);
  graph.links[0].type = LinkType::kUpi;
  EXPECT_HAS(ErrorOf(graph), "NUMA node at each end of a upi link");
  graph = Star(2);
  graph.links[0].width = 4;
  graph.links[0].max_width = 2;
  EXPECT_HAS(ErrorOf(graph), "at most max_width = 2, got 4");
  graph = Star(2);
  graph.gpus[1].uuid = graph.gpus[0].uuid = "GPU-1";
  EXPECT_HAS(ErrorOf(graph), "gpus[0] (\"gpu0\")'s");
  graph = Star(2);
  graph.gpus[1].id = "numa0";
  EXPECT_HAS(ErrorOf(graph), "which is numa_nodes[0] too");
  graph = Star(2);
  graph.numa_nodes.push_back({"numa1", 0});
  EXPECT_HAS(ErrorOf(graph), "add the upi link");
  graph = Star(2);
  graph.has_peer_access_list = true;
  graph.peer_access = {{0, 1}, {1, 0}};
  EXPECT_HAS(ErrorOf(graph), "peer_access[1]: expected each pair once");
  graph = Star(2);
  graph.link_groups = {{"g", {0, 0}, 1, 1}};
  EXPECT_HAS(ErrorOf(graph), "already in \"g\"");
}

TEST(TopologyTest, DegradedMeansBelowWhatTheEndsCanDo) {
  Link link;
  EXPECT_FALSE(link.is_degraded());
  link.width = link.max_width = 16;
  link.generation = 3;
  link.max_generation = 4;
  EXPECT_TRUE(link.is_degraded());
  link.generation = 4;
  EXPECT_FALSE(link.is_degraded());
  link.width = 4;
  EXPECT_TRUE(link.is_degraded());
}

}  // namespace
}  // namespace turbobus::topo

#include <gtest/gtest.h>

#include <algorithm>

#include "sched/virtual_node.h"

// Link groups and NUMA nodes: what lanes share beyond a GPU's own link.

namespace turbobus::sched {
namespace {

/// Every lane that uses one of `links` draws on the cap.
void AddCap(Config& config, double mib_per_ms, const std::vector<int>& links) {
  const int cap = static_cast<int>(config.caps.size());
  config.caps.push_back({"cap", mib_per_ms * kMibPerMs});
  for (LaneSpec& lane : config.lanes) {
    const topo::Path& path = lane.path;
    const int link = path.is_relay() ? path.relay : path.gpu;
    if (std::find(links.begin(), links.end(), link) != links.end()) {
      lane.caps.push_back(cap);
    }
  }
}

TEST(CapsTest, ARelayBehindTheSameFullUplinkIsNotUsed) {
  Config config = AllToAll({1, 1});
  AddCap(config, 1, {0, 1});
  VirtualNode node(config);
  node.Submit(1, 0, 100 * kMib);
  node.Run();
  EXPECT_LE(node.BytesOn(1, 1), kMib);
}

TEST(CapsTest, RelaysGetWhatDirectLanesLeaveOfACap) {
  // Room for two and a half of four links.
  Config config = AllToAll({1, 1, 1, 1});
  AddCap(config, 2.5, {0, 1, 2, 3});
  VirtualNode node(config);
  node.Submit(1, 0, 1000 * kMib);
  node.Run(200 * kMs);
  int64_t relayed = 0;
  for (int lane : {1, 2, 3}) relayed += node.BytesOn(lane, 1);
  // 200 ms at 1.5, plus the clock's headroom of 5 % and what is in flight.
  EXPECT_GE(relayed, 300 * kMib);
  EXPECT_LE(relayed, 321 * kMib);
}

TEST(CapsTest, AnotherGpusOwnTrafficComesBeforeRelaysInACap) {
  // GPUs 1 and 2 share an uplink as fast as one link. GPU 1 is busy itself.
  Config config = AllToAll({1, 1, 1});
  AddCap(config, 1, {1, 2});
  VirtualNode node(config);
  node.Submit({{.id = 1, .gpu = 0, .size_bytes = 100 * kMib},
               {.id = 2, .gpu = 1, .size_bytes = 50 * kMib}});
  node.Run(47 * kMs);
  EXPECT_EQ(node.BytesOn(1, 1) + node.BytesOn(2, 1), 0);
  node.Run();
  EXPECT_GE(node.BytesOn(1, 1) + node.BytesOn(2, 1), 20 * kMib);
  EXPECT_LE(node.DurationMs(1), 77);
}

TEST(CapsTest, SlotsKeepToCapsByTheSizeOfBlocks) {
  Config config = AllToAll({1, 1, 1, 1});
  config.mode = Mode::kLockStep;
  AddCap(config, 2.5, {0, 1, 2, 3});
  VirtualNode node(config);
  node.Submit(1, 0, 100 * kMib);
  node.Run();
  EXPECT_NEAR(node.DurationMs(1), 40, 1);
}

TEST(CapsTest, ACapThatDoesNotBindChangesNothing) {
  Config config = AllToAll({1, 1, 1, 1});
  AddCap(config, 4, {0, 1, 2, 3});
  VirtualNode node(config);
  node.Submit(1, 0, 64 * kMib);
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(1), 16);
}

}  // namespace
}  // namespace turbobus::sched

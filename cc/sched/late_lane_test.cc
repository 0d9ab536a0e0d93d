#include <gtest/gtest.h>

#include "sched/virtual_node.h"

// Traffic that the scheduler cannot see, felt by delay.

namespace turbobus::sched {
namespace {

TEST(LateLaneTest, ALateRelayBacksOffToProbes) {
  VirtualNode node(AllToAll({1, 1}));
  node.Slow(1, 2.0);
  node.Submit(1, 0, 1000 * kMib);
  node.Run();
  const LaneState state = node.scheduler().lane_state(1);
  EXPECT_TRUE(state.is_backed_off);
  // Three blocks to find out (one more was queued), then a probe per interval:
  // 5, 10, 20, 40, 80, 80, ... ms.
  EXPECT_LE(state.issued_bytes, 20 * kMib);
  EXPECT_LE(node.DurationMs(1), 1001);
}

TEST(LateLaneTest, ALateRelayRecoversWithAProbeOnTime) {
  VirtualNode node(AllToAll({1, 1}));
  node.Slow(1, 2.0);
  node.Submit(1, 0, 2000 * kMib);
  node.Run(100 * kMs);
  EXPECT_TRUE(node.scheduler().lane_state(1).is_backed_off);
  node.Slow(1, 1.0);
  node.Run(200 * kMs);
  EXPECT_FALSE(node.scheduler().lane_state(1).is_backed_off);
  const int64_t relayed = node.scheduler().lane_state(1).issued_bytes;
  node.Run(300 * kMs);
  EXPECT_GE(node.scheduler().lane_state(1).issued_bytes - relayed, 98 * kMib);
}

TEST(LateLaneTest, ALateDirectLaneNeverBacksOffButRelaysTakeMore) {
  VirtualNode node(AllToAll({1, 1}));
  node.Slow(0, 4.0);
  node.Submit(1, 0, 100 * kMib);
  node.Run();
  EXPECT_FALSE(node.scheduler().lane_state(0).is_backed_off);
  EXPECT_NEAR(node.scheduler().lane_state(0).lateness, 4, 0.2);
  EXPECT_LE(node.DurationMs(1), 84);
  EXPECT_GE(node.BytesOn(0, 1), 18 * kMib);
}

TEST(LateLaneTest, ARelayAsSlowAsTheDirectLaneStays) {
  VirtualNode node(AllToAll({1, 1}));
  node.Slow(0, 1.6);
  node.Slow(1, 1.6);
  node.Submit(1, 0, 1000 * kMib);
  node.Run();
  EXPECT_FALSE(node.scheduler().lane_state(1).is_backed_off);
  EXPECT_LE(node.DurationMs(1), 810);
  // Slower than that it is late, and the direct lane is alone.
  node.Slow(1, 3.0);
  node.Submit(2, 0, 1000 * kMib);
  node.Run();
  EXPECT_TRUE(node.scheduler().lane_state(1).is_backed_off);
  EXPECT_LE(node.DurationMs(2), 1605);
}

TEST(LateLaneTest, WaitingBehindOwnTrafficIsNotARelaysDelay) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit(1, 0, 400 * kMib);
  for (TransferId id = 2; id < 42; ++id) {
    node.Run(node.now_ns() + 5 * kMs);
    node.Submit(id, 1, 2 * kMib);
  }
  node.Run();
  EXPECT_FALSE(node.scheduler().lane_state(1).is_backed_off);
}

TEST(LateLaneTest, ADriverIsToldWhenAProbeIsDue) {
  VirtualNode node(AllToAll({1, 1}));
  node.Slow(1, 3.0);
  node.Submit(1, 0, 500 * kMib);
  node.Run(20 * kMs);
  ASSERT_TRUE(node.scheduler().lane_state(1).is_backed_off);
  const auto wakeup_ns = node.scheduler().NextWakeupNs();
  ASSERT_TRUE(wakeup_ns.has_value());
  EXPECT_GT(*wakeup_ns, node.now_ns());
  node.Run();
  EXPECT_FALSE(node.scheduler().NextWakeupNs().has_value());
}

}  // namespace
}  // namespace turbobus::sched

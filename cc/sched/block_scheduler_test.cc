#include <gtest/gtest.h>

#include "sched/virtual_node.h"

namespace turbobus::sched {
namespace {

TEST(BlockSchedulerTest, OneTransferUsesEveryIdleLink) {
  VirtualNode node(AllToAll({1, 1, 1, 1}));
  node.Submit(1, 0, 64 * kMib);
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(1), 16);
  node.ExpectEachByteOnce();
}

TEST(BlockSchedulerTest, TwoBlocksOverTwoEqualLinksTakeOneBlocksTime) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit(1, 0, 2 * kMib);
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(1), 1);
}

TEST(BlockSchedulerTest, BlocksOfBFillTheHalfEmptyRoundOfA) {
  for (const Mode mode : {Mode::kFreeRunning, Mode::kLockStep}) {
    Config config = AllToAll({1, 1, 1, 1});
    config.mode = mode;
    VirtualNode node(config);
    node.Submit(
        {{.id = 1, .size_bytes = 6 * kMib}, {.id = 2, .size_bytes = 2 * kMib}});
    node.Run();
    EXPECT_EQ(node.now_ns(), 2 * kMs);
    EXPECT_EQ(node.records().size(), 8);
  }
}

TEST(BlockSchedulerTest, ALongTransferDoesNotDelayAnotherGpusShortOne) {
  // 64 GiB and 1 GiB at 16 MiB blocks, in thousandths.
  VirtualNode node(AllToAll({1, 1}));
  node.Submit(1, 0, 4096 * kMib);
  node.Run(50 * kMs);
  node.Submit(2, 1, 64 * kMib);
  node.Run();
  EXPECT_LE(node.DurationMs(2), 64 + 2);
  EXPECT_LE(node.DurationMs(1), (4096 + 64) / 2 + 2);
}

TEST(BlockSchedulerTest, SlowRelaysNeverMakeTwoBlocksSlowerThanDirect) {
  for (const double slow : {3.0, 4.0}) {
    VirtualNode node(AllToAll({1, 1 / slow}));
    node.Submit(1, 0, 2 * kMib);
    node.Run();
    EXPECT_DOUBLE_EQ(node.DurationMs(1), 2);
  }
}

TEST(BlockSchedulerTest, FourBlocksWithRelaysOneFourFourReachTwiceDirect) {
  for (const auto& rates : {std::vector<double>{1, 1, 0.25, 0.25},
                            std::vector<double>{1, 0.25, 0.25, 1}}) {
    VirtualNode node(AllToAll(rates));
    node.Submit(1, 0, 4 * kMib);
    node.Run();
    EXPECT_DOUBLE_EQ(node.DurationMs(1), 2);
  }
}

}  // namespace
}  // namespace turbobus::sched

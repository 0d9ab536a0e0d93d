#include "sched/block_scheduler.h"

#include <gtest/gtest.h>

#include "sched/virtual_node.h"

namespace turbobus::sched {
namespace {

constexpr topo::Direction kH2d = topo::Direction::kH2d;
constexpr topo::Direction kD2h = topo::Direction::kD2h;

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
  // The paper's example: six blocks and two on four paths are two rounds.
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
  // 64 GiB and 1 GiB in blocks of 16 MiB, as numbers of blocks.
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
    EXPECT_LE(node.DurationMs(1), 2);
  }
}

TEST(BlockSchedulerTest, FourBlocksWithRelaysOneFourFourReachTwiceDirect) {
  for (const auto& rates : {std::vector<double>{1, 1, 0.25, 0.25},
                            std::vector<double>{1, 0.25, 0.25, 1}}) {
    VirtualNode node(AllToAll(rates));
    node.Submit(1, 0, 4 * kMib);
    node.Run();
    EXPECT_LE(node.DurationMs(1), 2);
  }
}

TEST(BlockSchedulerTest, ASlowRelayHelpsFarFromTheEndOnly) {
  VirtualNode node(AllToAll({1, 0.25}));
  node.Submit(1, 0, 100 * kMib);
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(1), 80);
  EXPECT_EQ(node.BytesOn(1, 1), 20 * kMib);
}

TEST(BlockSchedulerTest, OwnTrafficGoesBeforeWhatALinkRelays) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit(1, 0, 100 * kMib);
  node.Run(10 * kMs);
  node.Submit(2, 1, 20 * kMib);
  node.Run();
  // At most the two blocks in flight are ahead of it.
  EXPECT_LE(node.DurationMs(2), 22);
  for (const auto& record : node.records()) {
    const bool is_relayed_meanwhile = record.block.lane == 1 &&
                                      record.issue_ns > 10 * kMs &&
                                      record.issue_ns < 28 * kMs;
    EXPECT_FALSE(is_relayed_meanwhile) << record.issue_ns;
  }
}

TEST(BlockSchedulerTest, SymmetricTrafficStaysDirect) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit({{.id = 1, .gpu = 0, .size_bytes = 64 * kMib},
               {.id = 2, .gpu = 1, .size_bytes = 64 * kMib}});
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(1), 64);
  EXPECT_DOUBLE_EQ(node.DurationMs(2), 64);
  EXPECT_EQ(node.BytesOn(1, 1) + node.BytesOn(2, 2), 0);
}

TEST(BlockSchedulerTest, ATransferUnderHalfABlockIsOneDirectBlock) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit(1, 0, kMib / 2 - 1);
  ASSERT_EQ(node.records().size(), 1);
  EXPECT_EQ(node.records()[0].block.lane, 0);
  EXPECT_EQ(node.records()[0].block.size_bytes, kMib / 2 - 1);
}

TEST(BlockSchedulerTest, ASmallTransferWaitsForOneChunkOfALargeOne) {
  VirtualNode node(AllToAll({1}));
  node.Submit(1, 0, 1000 * kMib);
  node.Run(100 * kMs);
  node.Submit(2, 0, kMib / 4);
  node.Run(200 * kMs);
  ASSERT_TRUE(node.has_finished(2));
  // Eight blocks of a chunk and two that were in flight.
  EXPECT_LE(node.DurationMs(2), 10.25);
}

TEST(BlockSchedulerTest, ASmallTransferDoesNotJumpTheQueueOfItsLane) {
  VirtualNode node(AllToAll({1}));
  node.Submit({{.id = 1, .size_bytes = 4 * kMib},
               {.id = 2, .size_bytes = kMib / 4},
               {.id = 3, .size_bytes = kMib / 4}});
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(1), 4);
  EXPECT_DOUBLE_EQ(node.DurationMs(2), 4.25);
  EXPECT_DOUBLE_EQ(node.DurationMs(3), 4.5);
}

TEST(BlockSchedulerTest, TheTokenPassesInArrivalOrderAndRelaysAreItsAlone) {
  VirtualNode node(AllToAll({1, 1, 1}));
  node.Submit({{.id = 1, .size_bytes = 40 * kMib},
               {.id = 2, .size_bytes = 40 * kMib},
               {.id = 3, .size_bytes = 40 * kMib}});
  node.Run();
  TransferId last_relayed = 0;
  for (const auto& record : node.records()) {
    if (record.block.lane == 0) continue;
    EXPECT_GE(record.block.transfer, last_relayed);
    last_relayed = record.block.transfer;
  }
  EXPECT_EQ(last_relayed, 3);
  EXPECT_DOUBLE_EQ(static_cast<double>(node.now_ns()) / kMs, 40);
}

TEST(BlockSchedulerTest, ALargeTransferWithoutTheTokenHasItsDirectLane) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit({{.id = 1, .size_bytes = 400 * kMib},
               {.id = 2, .size_bytes = 400 * kMib}});
  node.Run(100 * kMs);
  EXPECT_GE(node.BytesOn(0, 2), 30 * kMib);
  EXPECT_EQ(node.BytesOn(1, 2), 0);
}

TEST(BlockSchedulerTest, AMiddlingTransferNeedsNoToken) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit(
      {{.id = 1, .size_bytes = 400 * kMib}, {.id = 2, .size_bytes = 8 * kMib}});
  node.Run(20 * kMs);
  EXPECT_TRUE(node.has_finished(2));
  EXPECT_GT(node.BytesOn(1, 2), 0);
}

TEST(BlockSchedulerTest, TwoBorrowersShareARelayBetweenThem) {
  VirtualNode node(AllToAll({1, 1, 1}));
  node.Submit({{.id = 1, .gpu = 0, .size_bytes = 90 * kMib},
               {.id = 2, .gpu = 1, .size_bytes = 90 * kMib}});
  node.Run();
  EXPECT_NEAR(node.DurationMs(1), 60, 2);
  EXPECT_NEAR(node.DurationMs(2), 60, 2);
}

TEST(BlockSchedulerTest, BothDirectionsRunSideBySide) {
  Config config = AllToAll({1, 1}, kMib, kH2d);
  for (const LaneSpec& lane : AllToAll({1, 1}, kMib, kD2h).lanes) {
    config.lanes.push_back(lane);
  }
  VirtualNode node(config);
  node.Submit(1, 0, 32 * kMib, kH2d);
  node.Submit(2, 0, 32 * kMib, kD2h);
  node.Run();
  EXPECT_NEAR(node.DurationMs(1), 16, 1.001);
  EXPECT_NEAR(node.DurationMs(2), 16, 1.001);
}

TEST(BlockSchedulerTest, WaitingForACollectiveBehindAnotherGpuIsNoDeadlock) {
  // GPU 0 runs psum then A; GPU 1 runs B then psum: A arrives (is ready) only
  // once B is done, because places are taken at readiness and not by handlers.
  VirtualNode node(AllToAll({1, 1}));
  node.Submit(/*B=*/2, 1, 64 * kMib);
  while (!node.has_finished(2)) node.Run(node.now_ns() + kMs);
  node.Submit(/*A=*/1, 0, 64 * kMib);
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(2), 32);
  EXPECT_DOUBLE_EQ(node.DurationMs(1), 32);
  // The other order of readiness: both at once, each on its own link.
  node.Submit({{.id = 3, .gpu = 0, .size_bytes = 64 * kMib},
               {.id = 4, .gpu = 1, .size_bytes = 64 * kMib}});
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(3), 64);
  EXPECT_DOUBLE_EQ(node.DurationMs(4), 64);
}

TEST(BlockSchedulerTest, NoBytesFinishAtOnce) {
  VirtualNode node(AllToAll({1}));
  node.Submit(1, 0, 0);
  EXPECT_TRUE(node.has_finished(1));
  EXPECT_TRUE(node.scheduler().is_idle());
}

TEST(BlockSchedulerTest, BadTransfersAreRefusedByTheNameOfTheField) {
  auto scheduler = *Scheduler::Create(AllToAll({1, 1}));
  ASSERT_TRUE(scheduler->Submit({.id = 1, .size_bytes = kMib}, 0).ok());
  EXPECT_EQ(scheduler->Submit({.id = 1, .size_bytes = kMib}, 0).message(),
            "transfer 1: id: a transfer with this id is not over yet");
  EXPECT_EQ(scheduler->Submit({.id = 2, .size_bytes = -1}, 0).message(),
            "transfer 2: size_bytes: expected >= 0, got -1");
  EXPECT_EQ(
      scheduler->Submit({.id = 2, .gpu = 5, .size_bytes = 1}, 0).message(),
      "transfer 2: gpu: no direct lane for GPU 5 h2d");
  EXPECT_EQ(scheduler->Complete(12345, 0).code(), StatusCode::kNotFound);
  EXPECT_EQ(scheduler->Complete(-1, 0).code(), StatusCode::kNotFound);
  EXPECT_EQ(scheduler->Cancel(7, 0).code(), StatusCode::kNotFound);
  EXPECT_EQ(scheduler->RemoveLane(99, 0).code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace turbobus::sched

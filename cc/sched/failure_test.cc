#include <gtest/gtest.h>

#include <algorithm>

#include "sched/virtual_node.h"

// Cancelled transfers, blocks that fail, lanes that vanish.

namespace turbobus::sched {
namespace {

std::vector<Block> Drain(Scheduler& scheduler, int64_t now_ns) {
  std::vector<Block> blocks;
  while (const auto block = scheduler.Next(now_ns)) blocks.push_back(*block);
  return blocks;
}

TEST(FailureTest, ACancelledTransferFinishesWithItsLastBlockInFlight) {
  auto scheduler = *Scheduler::Create(AllToAll({1, 1}));
  ASSERT_TRUE(scheduler->Submit({.id = 1, .size_bytes = 100 * kMib}, 0).ok());
  const std::vector<Block> blocks = Drain(*scheduler, 0);
  ASSERT_EQ(blocks.size(), 4);
  ASSERT_TRUE(scheduler->Cancel(1, 1).ok());
  EXPECT_TRUE(Drain(*scheduler, 1).empty());
  for (const Block& block : blocks) {
    EXPECT_TRUE(scheduler->TakeFinished().empty());
    EXPECT_TRUE(scheduler->Complete(block.id, 2).ok());
  }
  const auto finished = scheduler->TakeFinished();
  ASSERT_EQ(finished.size(), 1);
  EXPECT_TRUE(finished[0].is_cancelled);
  EXPECT_TRUE(scheduler->is_idle());
  EXPECT_EQ(scheduler->Cancel(1, 3).code(), StatusCode::kNotFound);
}

TEST(FailureTest, CancellingTheTokenHolderPassesTheToken) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit({{.id = 1, .size_bytes = 100 * kMib},
               {.id = 2, .size_bytes = 100 * kMib}});
  EXPECT_TRUE(node.scheduler().Cancel(1, 0).ok());
  node.Run();
  EXPECT_GE(node.BytesOn(1, 2), 48 * kMib);
}

TEST(FailureTest, WhatFailsOnARelayGoesDirectAndTheRelayBacksOff) {
  auto scheduler = *Scheduler::Create(AllToAll({1, 1}));
  ASSERT_TRUE(scheduler->Submit({.id = 1, .size_bytes = 2 * kMib}, 0).ok());
  const std::vector<Block> blocks = Drain(*scheduler, 0);
  ASSERT_EQ(blocks.size(), 2);
  ASSERT_EQ(blocks[1].lane, 1);
  ASSERT_TRUE(scheduler->Fail(blocks[1].id, kMs).ok());
  EXPECT_TRUE(scheduler->lane_state(1).is_backed_off);
  const std::vector<Block> retries = Drain(*scheduler, kMs);
  ASSERT_EQ(retries.size(), 1);
  EXPECT_EQ(retries[0].lane, 0);
  EXPECT_EQ(retries[0].offset_bytes, blocks[1].offset_bytes);
  EXPECT_EQ(retries[0].size_bytes, blocks[1].size_bytes);
  EXPECT_EQ(retries[0].num_failures, 1);
  EXPECT_EQ(scheduler->Fail(blocks[1].id, kMs).code(), StatusCode::kNotFound);
}

TEST(FailureTest, WhatFailsOnTheDirectLaneGoesToARelayEvenIfSmall) {
  auto scheduler = *Scheduler::Create(AllToAll({1, 1}));
  ASSERT_TRUE(scheduler->Submit({.id = 1, .size_bytes = 100}, 0).ok());
  const std::vector<Block> first = Drain(*scheduler, 0);
  ASSERT_EQ(first.size(), 1);
  ASSERT_TRUE(scheduler->Fail(first[0].id, 1).ok());
  const std::vector<Block> second = Drain(*scheduler, 1);
  ASSERT_EQ(second.size(), 1);
  EXPECT_EQ(second[0].lane, 1);
  // And from there back, as often as the driver has patience for.
  ASSERT_TRUE(scheduler->Fail(second[0].id, 2).ok());
  const std::vector<Block> third = Drain(*scheduler, 2);
  ASSERT_EQ(third.size(), 1);
  EXPECT_EQ(third[0].lane, 0);
  EXPECT_EQ(third[0].num_failures, 2);
}

TEST(FailureTest, WhatFailsOnTheOnlyLaneIsTriedThereAgain) {
  auto scheduler = *Scheduler::Create(AllToAll({1}));
  ASSERT_TRUE(scheduler->Submit({.id = 1, .size_bytes = 2 * kMib}, 0).ok());
  for (int i = 0; i < 5; ++i) {
    const std::vector<Block> blocks = Drain(*scheduler, i);
    ASSERT_EQ(blocks.size(), 2);
    for (const Block& block : blocks) {
      EXPECT_EQ(block.num_failures, i);
      ASSERT_TRUE(scheduler->Fail(block.id, i).ok());
    }
  }
  ASSERT_TRUE(scheduler->Cancel(1, 6).ok());
  EXPECT_TRUE(scheduler->is_idle());
}

TEST(FailureTest, AVanishedRelaysBlocksAreIssuedAgain) {
  VirtualNode node(AllToAll({1, 1, 1}));
  node.Submit(1, 0, 99 * kMib);
  node.Run(10 * kMs + kMs / 2);
  node.Remove(1);
  node.Run();
  ASSERT_TRUE(node.has_finished(1));
  node.ExpectEachByteOnce();
  EXPECT_TRUE(node.scheduler().lane_state(1).is_removed);
}

TEST(FailureTest, BlocksOfAVanishedLaneCanNoLongerBeCompleted) {
  auto scheduler = *Scheduler::Create(AllToAll({1, 1}));
  ASSERT_TRUE(scheduler->Submit({.id = 1, .size_bytes = 100 * kMib}, 0).ok());
  const std::vector<Block> blocks = Drain(*scheduler, 0);
  ASSERT_TRUE(scheduler->RemoveLane(1, 1).ok());
  for (const Block& block : blocks) {
    EXPECT_EQ(scheduler->Complete(block.id, 2).code(),
              block.lane == 1 ? StatusCode::kNotFound : StatusCode::kOk);
  }
  EXPECT_EQ(scheduler->RemoveLane(1, 3).code(), StatusCode::kNotFound);
}

TEST(FailureTest, WithoutItsDirectLaneATransferLivesOnRelaysAlone) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit({{.id = 1, .gpu = 0, .size_bytes = 50 * kMib},
               {.id = 2, .gpu = 0, .size_bytes = 50 * kMib},
               {.id = 3, .gpu = 0, .size_bytes = 1000},
               {.id = 4, .gpu = 1, .size_bytes = 50 * kMib}});
  node.Run(10 * kMs + kMs / 2);
  node.Remove(0);
  node.Submit(5, 0, 1000);
  node.Run();
  for (const TransferId id : {1, 2, 3, 4, 5}) {
    EXPECT_TRUE(node.has_finished(id)) << id;
  }
  node.ExpectEachByteOnce();
}

TEST(FailureTest, WithoutAnyLaneATransferIsStranded) {
  VirtualNode node(AllToAll({1, 1}));
  node.Submit({{.id = 1, .gpu = 0, .size_bytes = 50 * kMib},
               {.id = 2, .gpu = 1, .size_bytes = 50 * kMib}});
  node.Run(5 * kMs);
  node.Remove(0);
  node.Remove(1);
  EXPECT_EQ(node.scheduler().TakeStranded(), std::vector<TransferId>{1});
  EXPECT_EQ(
      node.scheduler().Submit({.id = 3, .gpu = 0, .size_bytes = 1}, 0).code(),
      StatusCode::kUnavailable);
  node.Run();
  EXPECT_TRUE(node.has_finished(2));
  EXPECT_TRUE(node.scheduler().is_idle());
}

TEST(FailureTest, ACancelledTransferIsNotStrandedButFinished) {
  auto scheduler = *Scheduler::Create(AllToAll({1}));
  ASSERT_TRUE(scheduler->Submit({.id = 1, .size_bytes = 5 * kMib}, 0).ok());
  EXPECT_EQ(Drain(*scheduler, 0).size(), 2);
  ASSERT_TRUE(scheduler->Cancel(1, 1).ok());
  ASSERT_TRUE(scheduler->RemoveLane(0, 2).ok());
  EXPECT_TRUE(scheduler->TakeStranded().empty());
  EXPECT_EQ(scheduler->TakeFinished().size(), 1);
}

}  // namespace
}  // namespace turbobus::sched

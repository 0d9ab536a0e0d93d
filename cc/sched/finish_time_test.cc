#include "sched/finish_time.h"

#include <gtest/gtest.h>

#include "sched/virtual_node.h"

namespace turbobus::sched {
namespace {

/// Transfers of GPU 0, queued in this order; a block takes a millisecond.
Tables Queued(const std::vector<int64_t>& num_blocks) {
  Tables tables = *Tables::Create(AllToAll({1, 1}));
  tables.transfers.resize(num_blocks.size());
  Queue& queue = tables.queues[0];
  for (size_t i = 0; i < num_blocks.size(); ++i) {
    TransferState& transfer = tables.transfers[i];
    transfer.queue = 0;
    transfer.left_bytes = transfer.chunk_left_bytes = num_blocks[i] * kMib;
    queue.queued_bytes += transfer.left_bytes;
    queue.queued.PushBack(tables.transfers, static_cast<int>(i));
  }
  return tables;
}

TEST(FinishTimeTest, ARelayMustBeSoonerThanTheDirectLaneWithAllOfTheTransfer) {
  const Tables tables = Queued({2});
  EXPECT_TRUE(
      FinishesBeforeDirect(tables, tables.transfers[0], 2 * kMs - 1, 0));
  EXPECT_FALSE(FinishesBeforeDirect(tables, tables.transfers[0], 2 * kMs, 0));
}

TEST(FinishTimeTest, WhatIsQueuedAheadCountsAndWhatIsBehindDoesNot) {
  const Tables tables = Queued({3, 2, 5});
  EXPECT_TRUE(
      FinishesBeforeDirect(tables, tables.transfers[1], 5 * kMs - 1, 0));
  EXPECT_FALSE(FinishesBeforeDirect(tables, tables.transfers[1], 5 * kMs, 0));
}

TEST(FinishTimeTest, WhatIsInFlightOnTheDirectLaneCounts) {
  Tables tables = Queued({1});
  tables.lanes[tables.queues[0].direct].backlog.Add(0, 3 * kMs);
  EXPECT_TRUE(
      FinishesBeforeDirect(tables, tables.transfers[0], 4 * kMs - 1, 0));
  EXPECT_FALSE(FinishesBeforeDirect(tables, tables.transfers[0], 4 * kMs, 0));
}

}  // namespace
}  // namespace turbobus::sched

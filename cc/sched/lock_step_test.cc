#include <gtest/gtest.h>

#include <map>

#include "sched/virtual_node.h"

// The paper's slots: one block a link, then all synchronise.

namespace turbobus::sched {
namespace {

Config LockStep(const std::vector<double>& rates, int64_t block_bytes = kMib) {
  Config config = AllToAll(rates, block_bytes);
  config.mode = Mode::kLockStep;
  return config;
}

TEST(LockStepTest, ASlotHasOneBlockALinkAndEndsWithTheLast) {
  VirtualNode node(LockStep({1, 1, 1, 1}));
  node.Submit({{.id = 1, .gpu = 0, .size_bytes = 40 * kMib},
               {.id = 2, .gpu = 1, .size_bytes = 40 * kMib}});
  node.Run();
  std::map<int64_t, std::map<int, int>> blocks;  // by slot and link
  for (const auto& record : node.records()) {
    ++blocks[record.issue_ns][record.block.lane % 4];
  }
  int64_t previous_end_ns = 0;
  for (const auto& [start_ns, by_link] : blocks) {
    EXPECT_GE(start_ns, previous_end_ns);
    for (const auto& [link, count] : by_link) EXPECT_EQ(count, 1);
    previous_end_ns = start_ns + kMs;
  }
  EXPECT_EQ(node.now_ns(), 20 * kMs);
  node.ExpectEachByteOnce();
}

TEST(LockStepTest, WhatArrivesDuringASlotWaitsForTheNext) {
  VirtualNode node(LockStep({1, 1}));
  node.Submit(1, 0, 20 * kMib);
  node.Run(5 * kMs + kMs / 2);
  const size_t num_before = node.records().size();
  node.Submit(2, 1, kMib);
  EXPECT_EQ(node.records().size(), num_before);
  node.Run();
  EXPECT_DOUBLE_EQ(node.DurationMs(2), 1.5);
}

TEST(LockStepTest, SlowLinksGetSmallerBlocksSoThatASlotStaysShort) {
  VirtualNode node(LockStep({1, 0.25}));
  node.Submit(1, 0, 100 * kMib);
  node.Run();
  EXPECT_NEAR(node.DurationMs(1), 80, 1.01);
  for (const auto& record : node.records()) {
    EXPECT_LE(record.block.size_bytes,
              record.block.lane == 1 ? kMib / 4 : kMib);
  }
}

TEST(LockStepTest, SlowRelaysNeverMakeItSlowerThanDirect) {
  for (const double slow : {1.5, 3.0, 4.0, 10.0, 100.0}) {
    for (const int64_t blocks : {1, 2, 3, 4, 16}) {
      VirtualNode node(LockStep({1, 1 / slow, 1 / slow}));
      node.Submit(1, 0, blocks * kMib);
      node.Run();
      EXPECT_LE(node.DurationMs(1), static_cast<double>(blocks) + 1e-3);
    }
  }
}

}  // namespace
}  // namespace turbobus::sched

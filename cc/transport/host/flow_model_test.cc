#include "transport/host/flow_model.h"

#include <gtest/gtest.h>

#include <limits>

namespace turbobus::transport::host {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();
constexpr int64_t kSecond = 1'000'000'000;

std::vector<int> On(std::initializer_list<int> resources) { return resources; }

TEST(FlowModelTest, AFlowAloneRunsAtTheRateOfItsSlowestResource) {
  FlowModel model({100, 50});
  const FlowId flow = model.Start(On({0, 1}), 200, kUnlimited, 0);
  EXPECT_EQ(model.NextEnd()->flow, flow);
  EXPECT_EQ(model.NextEnd()->time_ns, 4 * kSecond);
}

TEST(FlowModelTest, FlowsShareALinkEvenlyAndTheLastOneGetsItBack) {
  FlowModel model({100});
  const FlowId small = model.Start(On({0}), 100, kUnlimited, 0);
  const FlowId large = model.Start(On({0}), 300, kUnlimited, 0);
  EXPECT_EQ(model.NextEnd()->flow, small);
  EXPECT_EQ(model.NextEnd()->time_ns, 2 * kSecond);
  model.Remove(small, 2 * kSecond);
  // 100 of its bytes are over; 200 are left at the full rate.
  EXPECT_EQ(model.NextEnd()->flow, large);
  EXPECT_EQ(model.NextEnd()->time_ns, 4 * kSecond);
}

TEST(FlowModelTest, WhatOneFlowCannotUseGoesToTheOthers) {
  // 0: a shared uplink of 100; 1: a link of 20 that holds the first flow back.
  FlowModel model({100, 20});
  const FlowId slow = model.Start(On({0, 1}), 1000, kUnlimited, 0);
  const FlowId fast = model.Start(On({0}), 1000, kUnlimited, 0);
  EXPECT_DOUBLE_EQ(model.RateOf(slow), 20);
  EXPECT_DOUBLE_EQ(model.RateOf(fast), 80);
}

TEST(FlowModelTest, AFlowSlowedDownLeavesTheRestToTheOthersAtOnce) {
  FlowModel model({100});
  const FlowId a = model.Start(On({0}), 1000, kUnlimited, 0);
  const FlowId b = model.Start(On({0}), 1000, kUnlimited, 0);
  model.SetMaxRate(a, 10, kSecond);
  EXPECT_DOUBLE_EQ(model.RateOf(a), 10);
  EXPECT_DOUBLE_EQ(model.RateOf(b), 90);
}

TEST(FlowModelTest, NoBytesAndNoResourcesEndAtOnce) {
  FlowModel model({100});
  const FlowId empty = model.Start(On({0}), 0, kUnlimited, 7);
  EXPECT_EQ(model.NextEnd()->time_ns, 7);
  model.Remove(empty, 7);
  model.Start({}, 1 << 20, kUnlimited, 9);
  EXPECT_EQ(model.NextEnd()->time_ns, 9);
}

TEST(FlowModelTest, AnEndedFlowTakesNothingUntilItIsRemoved) {
  FlowModel model({100});
  model.Start(On({0}), 100, kUnlimited, 0);
  const FlowId late = model.Start(On({0}), 100, kUnlimited, 3 * kSecond);
  EXPECT_DOUBLE_EQ(model.RateOf(late), 100);
  EXPECT_EQ(model.NextEnd()->time_ns, kSecond);
}

TEST(FlowModelTest, ALongChainOfBlocksDoesNotDrift) {
  FlowModel model({200e6});
  constexpr int64_t kBlock = 16 << 20;
  constexpr int kNumBlocks = 1000;
  int64_t now_ns = 0;
  for (int i = 0; i < kNumBlocks; ++i) {
    const FlowId flow = model.Start(On({0}), kBlock, kUnlimited, now_ns);
    now_ns = model.NextEnd()->time_ns;
    model.Remove(flow, now_ns);
  }
  const double expected_ns = kNumBlocks * (kBlock / 200e6) * 1e9;
  EXPECT_NEAR(static_cast<double>(now_ns), expected_ns, kNumBlocks);
}

}  // namespace
}  // namespace turbobus::transport::host

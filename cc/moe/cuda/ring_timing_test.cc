#include "moe/cuda/ring_timing.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "moe/cuda/exchange_ranks.h"

namespace turbobus::moe::cuda {
namespace {

constexpr RingSize kSmall = {.num_slots = 2, .slot_bytes = 256 << 10};

TEST(RingSize, IsAsMeasuredUnlessTheEnvironmentSaysOtherwise) {
  const RingSize constant = RingSize::FromEnvironment().value();
  EXPECT_EQ(constant.num_slots, RingSize().num_slots);
  EXPECT_EQ(constant.slot_bytes, RingSize().slot_bytes);
  ASSERT_TRUE(
      RingSize::SetMeasured({.num_slots = 2, .slot_bytes = 8 << 20}).ok());
  EXPECT_EQ(RingSize::FromEnvironment()->num_slots, 2);
  EXPECT_EQ(RingSize::FromEnvironment()->slot_bytes, 8 << 20);
  setenv("JAX_TURBOBUS_EXCHANGE_SLOTS", "5", 1);
  const RingSize named = RingSize::FromEnvironment().value();
  unsetenv("JAX_TURBOBUS_EXCHANGE_SLOTS");
  EXPECT_EQ(named.num_slots, 5);
  EXPECT_EQ(named.slot_bytes, 8 << 20);
  ASSERT_TRUE(RingSize::SetMeasured(constant).ok());
}

TEST(RingSize, IsNotMeasuredToBeImpossible) {
  for (const RingSize size :
       {RingSize{0, 4 << 20}, RingSize{65, 4 << 20}, RingSize{3, 4095},
        RingSize{3, int64_t{2} << 30}}) {
    EXPECT_EQ(RingSize::SetMeasured(size).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(RingSize::FromEnvironment()->num_slots, RingSize().num_slots);
}

using TimeWaysOnGpus = testing::GpuTest;

// Two ranks, on a GPU each or both on one.
TEST_F(TimeWaysOnGpus, BothWaysAtOnce) {
  const int a = testing::DeviceOf(0), b = testing::DeviceOf(1);
  for (const int64_t size : {int64_t{1}, int64_t{8} << 20}) {
    const auto seconds = TimeWays({{a, b, {}}, {b, a, {}}}, size, kSmall, 2);
    ASSERT_TRUE(seconds.ok()) << seconds.status();
    ASSERT_EQ(seconds->size(), 2u);
    for (const double one : *seconds) {
      EXPECT_GT(one, 0.0);
      EXPECT_LT(one, 10.0);
      // No link carries a TB/s, nor do host memory's.
      EXPECT_LT(static_cast<double>(size) / one, 1e12);
    }
  }
}

TEST_F(TimeWaysOnGpus, KeepsNoMemory) {
  size_t before = 0, after = 0, total = 0;
  ASSERT_TRUE(TimeWays({{0, 0, {}}}, 1 << 20, kSmall, 1).ok());
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(TimeWays({{0, 0, {}}}, 64 << 20, kSmall, 1).ok());
  }
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_LT(before, after + (int64_t{64} << 20));
}

TEST_F(TimeWaysOnGpus, SaysWhatThereIsNoRoomFor) {
  const auto none = TimeWays({{0, 0, {}}}, int64_t{1} << 50, kSmall, 1);
  EXPECT_EQ(none.status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(TimeWays({{0, 0, {}}}, 1 << 20, kSmall, 1).ok());
  EXPECT_FALSE(TimeWays({}, 1 << 20, kSmall, 1).ok());
}

}  // namespace
}  // namespace turbobus::moe::cuda

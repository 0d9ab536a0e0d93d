#include "moe/traffic.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "moe/exchange_testing.h"

namespace turbobus::moe {
namespace {

using testing::Layer;

TEST(TrafficTest, ATokenIsCountedOnceForEachRankItGoesTo) {
  std::mt19937 random(11);
  Layer layer({.num_ranks = 2,
               .num_experts = 4,
               .num_tokens = 2,
               .top_k = 2,
               .recv_capacity = 8},
              8, 1, random);
  layer.ids = {{2, 3, 0, 2}, {1, 1, -1, 3}};
  TrafficLog::Process().Reset();
  layer.Dispatch();
  layer.Combine(/*is_weighted=*/true);
  layer.config.schedule = Schedule::kBroadcast;
  layer.Combine(/*is_weighted=*/true);
  const int64_t row = layer.config.row_bytes;
  const std::vector<Traffic> traffic = TrafficLog::Process().Read();
  ASSERT_EQ(traffic.size(), 3u);
  EXPECT_EQ(traffic[0].op, "combine");
  EXPECT_EQ(traffic[0].schedule, Schedule::kPacked);
  EXPECT_EQ(traffic[0].bytes, (std::vector<int64_t>{0, row, 2 * row, 0}));
  EXPECT_EQ(traffic[1].op, "combine");
  EXPECT_EQ(traffic[1].schedule, Schedule::kBroadcast);
  EXPECT_EQ(traffic[1].bytes, (std::vector<int64_t>{0, 2 * row, 2 * row, 0}));
  EXPECT_EQ(traffic[2].op, "dispatch");
  EXPECT_EQ(traffic[2].num_calls, 1);
  EXPECT_EQ(traffic[2].bytes, (std::vector<int64_t>{0, 2 * row, row, 0}));
  TrafficLog::Process().Reset();
  EXPECT_TRUE(TrafficLog::Process().Read().empty());
}

}  // namespace
}  // namespace turbobus::moe

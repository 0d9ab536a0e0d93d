#include "sched/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace turbobus::sched {
namespace {

constexpr int64_t kMiB = 1 << 20;

SplitLane Lane(double gb_per_s, int64_t latency_us = 0) {
  return {.bandwidth_bytes_per_s = gb_per_s * 1e9,
          .latency_ns = latency_us * 1000};
}

int64_t Sum(const std::vector<int64_t>& shares) {
  return std::accumulate(shares.begin(), shares.end(), int64_t{0});
}

TEST(SplitTest, EqualLanesShareEvenly) {
  const std::vector<SplitLane> lanes = {Lane(50), Lane(50)};
  const auto shares = Split(lanes, 1024 * kMiB);
  EXPECT_NEAR(shares[1], 512 * kMiB, 8192);
  EXPECT_EQ(Sum(shares), 1024 * kMiB);
}

TEST(SplitTest, TheLatencyOfARelayShrinksItsShare) {
  const std::vector<SplitLane> lanes = {Lane(50, 8), Lane(50, 40)};
  const auto shares = Split(lanes, 16 * kMiB);
  // 32 us at 50 GB/s are 1.6 MB, half of which moves to the direct lane.
  EXPECT_NEAR(shares[0] - shares[1], 1.6e6, 16384);
}

TEST(SplitTest, ASmallTransferStaysOnTheDirectLane) {
  const std::vector<SplitLane> lanes = {Lane(50, 8), Lane(50, 40)};
  EXPECT_EQ(Split(lanes, 1 * kMiB)[0], 1 * kMiB);
}

TEST(SplitTest, ASlowRelayWithAQueueIsNotUsed) {
  std::vector<SplitLane> lanes = {Lane(50), Lane(50)};
  lanes[1].fifo_bytes = 64 * kMiB;
  EXPECT_EQ(Split(lanes, 64 * kMiB)[0], 64 * kMiB);
  EXPECT_GT(Split(lanes, 128 * kMiB)[1], 30 * kMiB);
}

TEST(SplitTest, ASharedLinkIsHalfASpeedUntilTheOthersAreDone) {
  std::vector<SplitLane> lanes = {Lane(50), Lane(50)};
  lanes[1].shared_bytes = 16 * kMiB;
  const auto shares = Split(lanes, 256 * kMiB);
  EXPECT_NEAR(shares[1], 120 * kMiB, 8192);
  lanes[1].shared_bytes = 1024 * kMiB;
  EXPECT_NEAR(Split(lanes, 256 * kMiB)[1], 256.0 / 3 * kMiB, 8192);
}

TEST(SplitTest, WithBothLinksEquallyBusyTheWorkIsStillSharedOut) {
  std::vector<SplitLane> lanes = {Lane(50), Lane(50)};
  lanes[0].shared_bytes = lanes[1].shared_bytes = 512 * kMiB;
  EXPECT_NEAR(Split(lanes, 1024 * kMiB)[1], 512 * kMiB, 8192);
}

TEST(SplitTest, AProbeIsAllThatABackedOffRelayGets) {
  std::vector<SplitLane> lanes = {Lane(50), Lane(50)};
  lanes[1].max_bytes = 16 * kMiB;
  EXPECT_EQ(Split(lanes, 256 * kMiB)[1], 16 * kMiB);
}

TEST(SplitTest, NoMixOfRatesIsExpectedToBeSlowerThanDirect) {
  std::mt19937_64 random(20261130);
  const auto draw = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  for (int i = 0; i < 5000; ++i) {
    std::vector<SplitLane> lanes(1 + random() % 5);
    for (SplitLane& lane : lanes) {
      lane = Lane(draw(1, 100), static_cast<int64_t>(draw(0, 100)));
      lane.fifo_bytes = random() % 3 ? 0 : random() % (256 * kMiB);
      lane.shared_bytes = random() % 3 ? 0 : random() % (256 * kMiB);
      if (random() % 8 == 0) lane.max_bytes = random() % (8 * kMiB);
    }
    lanes[0].max_bytes = INT64_MAX;
    const auto size = static_cast<int64_t>(random() % (1024 * kMiB));
    const auto shares = Split(lanes, size);
    ASSERT_EQ(Sum(shares), size);
    double finish_ns = 0;
    for (size_t k = 0; k < lanes.size(); ++k) {
      ASSERT_GE(shares[k], 0);
      ASSERT_LE(shares[k], lanes[k].max_bytes);
      if (shares[k] > 0) {
        finish_ns = std::max(
            finish_ns, FinishNs(lanes[k], static_cast<double>(shares[k])));
      }
    }
    ASSERT_LE(finish_ns, FinishNs(lanes[0], static_cast<double>(size)) + 1);
  }
}

TEST(CutBlocksTest, CoversTheShareOnce) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 2000; ++i) {
    const auto share = static_cast<int64_t>(random() % (200 * kMiB));
    const int64_t block = (1 + random() % 32) * kMiB;
    for (const bool is_tapered : {false, true}) {
      const auto blocks = CutBlocks(share, block, is_tapered);
      ASSERT_EQ(Sum(blocks), share);
      for (const int64_t b : blocks) {
        ASSERT_GT(b, 0);
        ASSERT_LE(b, block);
      }
    }
  }
}

TEST(CutBlocksTest, ATaperedShareEndsInAShortBlock) {
  const auto blocks = CutBlocks(512 * kMiB, 16 * kMiB, true);
  EXPECT_LE(blocks.back(), 4 * kMiB);
  EXPECT_LE(blocks.size(), 512 / 16 + 5);
}

}  // namespace
}  // namespace turbobus::sched

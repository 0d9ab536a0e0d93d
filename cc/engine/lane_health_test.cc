#include "engine/lane_health.h"

#include <gtest/gtest.h>

namespace turbobus::engine {
namespace {

TEST(LaneHealthTest, ALittleLateIsNotLate) {
  LaneHealth health;
  for (int i = 0; i < 10; ++i) health.Record(120, 100, 1.25);
  EXPECT_EQ(health.share(), 1);
  EXPECT_EQ(health.num_late(), 0);
}

TEST(LaneHealthTest, WhatTakesTwiceAsLongIsPlannedWithAtHalfTheRate) {
  LaneHealth health;
  health.Record(200, 100, 1.25);
  EXPECT_DOUBLE_EQ(health.share(), 0.5);
  EXPECT_FALSE(health.is_backed_off());
  EXPECT_EQ(health.num_late(), 1);
}

TEST(LaneHealthTest, ABlockedLinkBacksOffAndComesBackInAFewProbes) {
  LaneHealth health;
  health.Record(5000, 100, 1.25);
  EXPECT_TRUE(health.is_backed_off());
  health.Record(100, 100, 1.25);
  EXPECT_FALSE(health.is_backed_off());
  for (int i = 0; i < 3; ++i) health.Record(100, 100, 1.25);
  EXPECT_EQ(health.share(), 1);
}

TEST(LaneHealthTest, AHalfBusyLinkSettlesNearHalf) {
  LaneHealth health;
  for (int i = 0; i < 20; ++i) health.Record(200, 100, 1.25);
  EXPECT_NEAR(health.share(), 0.5, 0.01);
}

TEST(LoanBookTest, AnAccidentIsForgivenThenLossesArePaidBack) {
  LoanBook loans;
  loans.Record(-LoanBook::kFirstCreditNs, 0);
  EXPECT_FALSE(loans.is_paused(0));
  loans.Record(-1000, 10);
  EXPECT_TRUE(loans.is_paused(10));
  EXPECT_TRUE(loans.is_paused(10 + 63'999));
  EXPECT_FALSE(loans.is_paused(10 + 64'000));
}

TEST(LoanBookTest, WhatWasGainedLongAgoCoversNoMoreThanASecond) {
  LoanBook loans;
  for (int i = 0; i < 1000; ++i) loans.Record(10'000'000, i);
  loans.Record(-LoanBook::kMostCreditNs, 1000);
  EXPECT_FALSE(loans.is_paused(1000));
  loans.Record(-1, 1000);
  EXPECT_TRUE(loans.is_paused(1000));
}

TEST(LoanBookTest, StrangersThatComeAndGoCostNoMoreThanTwoPercent) {
  // Phases of 40 ms; a transfer alone takes 20 ms, with the relay 10, and when
  // it meets strangers, 60.
  LoanBook loans;
  int64_t now_ns = 0;
  int64_t num_transfers = 0;
  while (now_ns < 120'000'000'000) {
    int64_t took_ns = 20'000'000;
    if (!loans.is_paused(now_ns)) {
      const bool is_busy = now_ns / 40'000'000 % 2 == 0;
      took_ns = is_busy ? 60'000'000 : 10'000'000;
      loans.Record(20'000'000 - took_ns, now_ns + took_ns);
    }
    now_ns += took_ns;
    ++num_transfers;
  }
  EXPECT_GT(num_transfers * 20'000'000, now_ns - now_ns / 50);
}

TEST(RivalryTest, IsLikelyAfterTheFirstAndForgottenAfterTwo) {
  Rivalry rivalry;
  EXPECT_FALSE(rivalry.is_likely());
  rivalry.Record(1);
  EXPECT_TRUE(rivalry.is_likely());
  rivalry.Record(0);
  rivalry.Record(0);
  EXPECT_FALSE(rivalry.is_likely());
  for (int i = 0; i < 10; ++i) rivalry.Record(0.1);
  EXPECT_FALSE(rivalry.is_likely());
}

}  // namespace
}  // namespace turbobus::engine

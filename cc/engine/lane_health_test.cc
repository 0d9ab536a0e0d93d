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

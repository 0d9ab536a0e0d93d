#include "sched/late_detector.h"

#include <gtest/gtest.h>

namespace turbobus::sched {
namespace {

LateDetector Make() {
  return LateDetector({.late_factor = 1.25,
                       .probe_interval_ns = 100,
                       .max_probe_interval_ns = 350});
}

TEST(LateDetectorTest, OneLateBlockIsNotEnough) {
  LateDetector late = Make();
  EXPECT_FALSE(late.Record(20, 10, 0));
  EXPECT_FALSE(late.Record(20, 10, 0));
  EXPECT_FALSE(late.Record(10, 10, 0));
  EXPECT_FALSE(late.Record(20, 10, 0));
  EXPECT_FALSE(late.Record(20, 10, 0));
  EXPECT_FALSE(late.is_backed_off());
}

TEST(LateDetectorTest, WhatSlowsTheOtherLaneTooIsNoReasonToLeave) {
  LateDetector late = Make();
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(late.Record(20, 10, 0, 2.0));
  EXPECT_GT(late.lateness(), 1.9);
  EXPECT_FALSE(late.Record(26, 10, 0, 2.0));
  EXPECT_FALSE(late.Record(26, 10, 0, 2.0));
  EXPECT_TRUE(late.Record(26, 10, 0, 2.0));
}

TEST(LateDetectorTest, ThreeLateBlocksInARowBackOff) {
  LateDetector late = Make();
  EXPECT_FALSE(late.Record(13, 10, 1000));
  EXPECT_FALSE(late.Record(13, 10, 1000));
  EXPECT_TRUE(late.Record(13, 10, 1000));
  EXPECT_TRUE(late.is_backed_off());
  EXPECT_EQ(late.next_probe_ns(), 1100);
}

TEST(LateDetectorTest, BlocksWithinTheFactorAreOnTime) {
  LateDetector late = Make();
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(late.Record(125, 100, i));
  EXPECT_NEAR(late.lateness(), 1.25, 1e-6);
}

TEST(LateDetectorTest, LateProbesDoubleTheIntervalUpToItsLimit) {
  LateDetector late = Make();
  EXPECT_TRUE(late.Fail(0));
  EXPECT_EQ(late.next_probe_ns(), 100);
  EXPECT_FALSE(late.Record(20, 10, 0));
  EXPECT_EQ(late.next_probe_ns(), 200);
  EXPECT_FALSE(late.Record(20, 10, 0));
  EXPECT_EQ(late.next_probe_ns(), 350);
}

TEST(LateDetectorTest, AProbeOnTimeEndsTheMatter) {
  LateDetector late = Make();
  EXPECT_TRUE(late.Fail(0));
  EXPECT_TRUE(late.Record(10, 10, 200));
  EXPECT_FALSE(late.is_backed_off());
  EXPECT_EQ(late.lateness(), 1);
  // The next time it starts with the shortest interval again.
  EXPECT_TRUE(late.Fail(1000));
  EXPECT_EQ(late.next_probe_ns(), 1100);
}

TEST(LateDetectorTest, EarlyBlocksDoNotMakeALaneFasterThanPromised) {
  LateDetector late = Make();
  EXPECT_FALSE(late.Record(1, 10, 0));
  EXPECT_EQ(late.lateness(), 1);
}

}  // namespace
}  // namespace turbobus::sched

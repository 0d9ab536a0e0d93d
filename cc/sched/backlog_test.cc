#include "sched/backlog.h"

#include <gtest/gtest.h>

namespace turbobus::sched {
namespace {

TEST(BacklogTest, AnEmptyOneIsFreeNow) { EXPECT_EQ(Backlog().FreeAt(7), 7); }

TEST(BacklogTest, BlocksAreServedOneAfterTheOther) {
  Backlog backlog;
  backlog.Add(100, 10);
  backlog.Add(104, 10);
  EXPECT_EQ(backlog.FreeAt(104), 120);
  backlog.Remove(110, 10);
  EXPECT_EQ(backlog.FreeAt(110), 120);
}

TEST(BacklogTest, TheRestIsCountedFromTheLastCompletion) {
  Backlog backlog;
  backlog.Add(0, 10);
  backlog.Add(0, 10);
  backlog.Remove(15, 10);  // five late
  EXPECT_EQ(backlog.FreeAt(15), 25);
}

TEST(BacklogTest, WhatIsOverdueIsExpectedToTakeAsLongAgain) {
  Backlog backlog;
  backlog.Add(0, 10);
  EXPECT_EQ(backlog.FreeAtIfLate(3), 10);
  EXPECT_EQ(backlog.FreeAtIfLate(10), 10);
  EXPECT_EQ(backlog.FreeAtIfLate(14), 18);
  EXPECT_EQ(backlog.FreeAt(14), 14);
}

}  // namespace
}  // namespace turbobus::sched

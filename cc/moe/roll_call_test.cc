#include "moe/roll_call.h"

#include <gtest/gtest.h>

#include <future>

namespace turbobus::moe {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class RollCallTest : public ::testing::Test {
 protected:
  void Later(seconds time) { rolls_.Check(RollCall::Clock::now() + time); }

  const Place place_{
      .run = 7, .site = 1, .group = 0, .op = "sum over axis 'x'"};
  std::vector<std::string> said_;
  RollCall rolls_{[] { return milliseconds(3000); },
                  [this](const std::string& text) { said_.push_back(text); }};
};

TEST_F(RollCallTest, NothingIsSaidWhereAllHaveCome) {
  for (int times = 0; times < 3; ++times) {
    for (int rank : {2, 0, 1}) rolls_.Come(place_, rank, 3);
  }
  EXPECT_EQ(rolls_.num_open(), 0);
  Later(seconds(100));
  EXPECT_TRUE(said_.empty());
}

TEST_F(RollCallTest, TheMissingAreNamedOnceAfterAWhile) {
  for (int rank : {0, 1, 3}) rolls_.Come(place_, rank, 4);
  Later(seconds(2));
  EXPECT_TRUE(said_.empty());
  Later(seconds(4));
  Later(seconds(5));
  ASSERT_EQ(said_.size(), 1u);
  for (const char* part :
       {"jax_turbobus: sum over axis 'x': rank 2 of 4 did not come within 3 s",
        "ranks 0, 1, 3 wait", "lax.cond"}) {
    EXPECT_NE(said_[0].find(part), std::string::npos) << said_[0];
  }
}

TEST_F(RollCallTest, ACallThatComesAgainIsCounted) {
  rolls_.Come(place_, 0, 2);
  rolls_.Come(place_, 0, 2);
  rolls_.Come(place_, 1, 2);
  Later(seconds(4));
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_NE(said_[0].find("rank 1 of 2"), std::string::npos) << said_[0];
  rolls_.Come(place_, 1, 2);
  EXPECT_EQ(rolls_.num_open(), 0);
}

TEST_F(RollCallTest, PlacesDoNotStandInForEachOther) {
  Place other = place_;
  rolls_.Come(place_, 0, 2);
  for (auto change :
       {+[](Place& p) { p.run = 8; }, +[](Place& p) { ++p.site; },
        +[](Place& p) { ++p.group; }, +[](Place& p) { p.op = "max"; }}) {
    change(other);
    rolls_.Come(other, 1, 2);
  }
  EXPECT_EQ(rolls_.num_open(), 5);
}

TEST(RollCallWatcherTest, TheWatcherSaysIt) {
  std::promise<std::string> said;
  RollCall rolls([] { return milliseconds(20); },
                 [&](const std::string& text) { said.set_value(text); });
  rolls.Come({.op = "sum"}, 1, 2);
  EXPECT_NE(said.get_future().get().find("rank 0 of 2"), std::string::npos);
}

}  // namespace
}  // namespace turbobus::moe

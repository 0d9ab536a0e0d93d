#include "moe/blocking_meeting.h"

#include <gtest/gtest.h>

#include <array>
#include <latch>
#include <string>
#include <thread>

namespace turbobus::moe {
namespace {

using std::chrono::milliseconds;

BlockingMeeting::Rank Who(int rank, int num_ranks) {
  return {.op = "dispatch over axis 'x'", .rank = rank, .num_ranks = num_ranks};
}

TEST(BlockingMeetingTest, RanksSwapRecordsInEveryPhase) {
  BlockingMeeting meeting(milliseconds(10'000));
  constexpr int kRanks = 8;
  constexpr int kCalls = 200;
  std::vector<std::thread> threads;
  std::vector<int> num_wrong(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (int call = 0; call < kCalls; ++call) {
        const CallKey key{.run_id = 7,
                          .position = meeting.NextPosition(7, rank)};
        for (int phase = 0; phase < 2; ++phase) {
          const uint64_t base = call * 100 + phase * 10;
          const auto records =
              meeting.Meet(key, phase, Who(rank, kRanks),
                           {{base + static_cast<uint64_t>(rank)}, nullptr});
          for (int r = 0; r < kRanks; ++r) {
            if (!records.ok() ||
                (**records)[r].values[0] != base + static_cast<uint64_t>(r)) {
              ++num_wrong[rank];
            }
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, std::vector<int>(kRanks, 0));
  EXPECT_EQ(meeting.num_open(), 0);
}

TEST(BlockingMeetingTest, AMissingRankFailsTheOthersAndItselfWithItsName) {
  BlockingMeeting meeting(milliseconds(30));
  const CallKey key{.run_id = 1};
  Status first;
  std::thread waiter(
      [&] { first = meeting.Meet(key, 0, Who(0, 3), {}).status(); });
  const Status second = meeting.Meet(key, 0, Who(2, 3), {}).status();
  waiter.join();
  EXPECT_EQ(first.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(first, second);
  EXPECT_NE(first.message().find("rank(s) 1 of 3"), std::string::npos) << first;
  EXPECT_EQ(meeting.Meet(key, 0, Who(1, 3), {}).status(), first);
  EXPECT_EQ(meeting.num_open(), 0);
}

TEST(BlockingMeetingTest, ARankThatFailsFreesThoseWhoWait) {
  BlockingMeeting meeting(milliseconds(10'000));
  const CallKey key{.run_id = 1};
  Status first;
  std::thread waiter(
      [&] { first = meeting.Meet(key, 1, Who(0, 2), {}).status(); });
  meeting.Fail(key, Who(1, 2), Unavailable("no peer mapping"));
  waiter.join();
  EXPECT_EQ(first.code(), StatusCode::kUnavailable);
  EXPECT_EQ(first.message(),
            "dispatch over axis 'x': rank 1 failed: no peer mapping");
}

TEST(BlockingMeetingTest, WhoWaitsForSomethingElseCanAskWhetherACallHasFailed) {
  BlockingMeeting meeting(milliseconds(10));
  EXPECT_EQ(meeting.timeout(), milliseconds(10));
  const CallKey key{.run_id = 1};
  EXPECT_TRUE(meeting.Failure(key).ok());
  meeting.Fail(key, Who(1, 2), Unavailable("no memory"));
  EXPECT_EQ(meeting.Failure(key).code(), StatusCode::kUnavailable);
  EXPECT_TRUE(meeting.Failure({.run_id = 1, .position = 1}).ok());
}

TEST(BlockingMeetingTest, RanksThatDisagreeAreToldSo) {
  BlockingMeeting meeting(milliseconds(10'000));
  const CallKey key{.run_id = 1};
  Status first;
  std::thread waiter(
      [&] { first = meeting.Meet(key, 0, Who(0, 3), {}).status(); });
  while (meeting.num_open() == 0) std::this_thread::yield();
  const Status second = meeting.Meet(key, 0, Who(1, 2), {}).status();
  waiter.join();
  EXPECT_EQ(second.code(), StatusCode::kInternal);
  EXPECT_EQ(first, second);
}

/// What two programs say that two Python threads start on two devices, each of
/// which runs another one first: `said[rank][call]`. `between` is called
/// between a rank's two calls.
template <typename Between>
std::array<std::array<Status, 2>, 2> InCrossedOrder(BlockingMeeting& meeting,
                                                    Between between) {
  std::array<std::array<Status, 2>, 2> said;
  const auto make_calls = [&](int rank) {
    for (const int call : {rank, 1 - rank}) {
      said[rank][call] =
          meeting.Meet({.run_id = call}, 0, Who(rank, 2), {}).status();
      if (call == rank) between();
    }
  };
  std::thread other([&] { make_calls(1); });
  make_calls(0);
  other.join();
  EXPECT_EQ(meeting.num_open(), 0);
  return said;
}

void ExpectLateness(const Status& status, int missing_rank) {
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  const std::string names =
      "dispatch over axis 'x': waited 30 ms for rank(s) " +
      std::to_string(missing_rank) + " of 2";
  EXPECT_NE(status.message().find(names), std::string::npos) << status;
}

TEST(BlockingMeetingTest, TwoCallsInCrossedOrderEndInAnErrorEach) {
  BlockingMeeting meeting(milliseconds(30));
  std::latch both_waited(2);
  const auto said =
      InCrossedOrder(meeting, [&] { both_waited.arrive_and_wait(); });
  for (const int call : {0, 1}) {
    ExpectLateness(said[call][call], 1 - call);
    EXPECT_EQ(said[0][call], said[1][call]);
  }
}

TEST(BlockingMeetingTest, OfTwoCallsInCrossedOrderTheSecondMayStillMeet) {
  BlockingMeeting meeting(milliseconds(30));
  const auto said = InCrossedOrder(meeting, [] {});
  int num_late = 0;
  for (const int call : {0, 1}) {
    // Whatever it is, both ranks say the same.
    EXPECT_EQ(said[0][call], said[1][call]);
    if (said[call][call].ok()) continue;
    ExpectLateness(said[call][call], 1 - call);
    ++num_late;
  }
  EXPECT_GE(num_late, 1);
}

TEST(BlockingMeetingTest, PositionsCountByRunAndDeviceAndOldRunsAreForgotten) {
  BlockingMeeting meeting(milliseconds(10));
  EXPECT_EQ(meeting.NextPosition(5, 0), 0);
  EXPECT_EQ(meeting.NextPosition(5, 1), 0);
  EXPECT_EQ(meeting.NextPosition(5, 0), 1);
  for (int run = 6; run < 20'000; ++run) meeting.NextPosition(run, 0);
  EXPECT_EQ(meeting.NextPosition(19'999, 0), 1);
  EXPECT_EQ(meeting.NextPosition(5, 0), 0);
}

}  // namespace
}  // namespace turbobus::moe

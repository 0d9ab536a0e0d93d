#include "moe/blocking_meeting.h"

#include <gtest/gtest.h>

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

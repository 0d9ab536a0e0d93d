#include "moe/rendezvous.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <random>
#include <set>
#include <thread>

namespace turbobus::moe {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// What became of one rank's call.
struct Outcome {
  std::latch done{1};
  Status status;
  int64_t sum = -1;  // Of all ranks' values, as the work computed it.
};

class TestMember : public Member {
 public:
  TestMember(int64_t value, Outcome* outcome)
      : value(value), outcome(outcome) {}

  void Done(const Status& status) override {
    outcome->status = status;
    outcome->done.count_down();
  }

  const int64_t value;
  Outcome* const outcome;
};

/// Piece r writes the sum of all values to rank r.
class SumWork : public Work {
 public:
  explicit SumWork(Members members) : members_(members) {}
  int64_t num_pieces() const override { return members_.size(); }
  void Run(int64_t piece) override {
    int64_t sum = 0;
    for (const auto& member : members_) sum += Get(*member).value;
    Get(*members_[piece]).outcome->sum = sum;
  }

  static StatusOr<std::unique_ptr<Work>> Make(Members members) {
    return std::unique_ptr<Work>(new SumWork(members));
  }

 private:
  static TestMember& Get(Member& m) { return static_cast<TestMember&>(m); }
  const Members members_;
};

Meeting At(uint64_t key, int rank, int num_ranks) {
  return {.key = key,
          .op = "sum over axis 'x'",
          .rank = rank,
          .num_ranks = num_ranks,
          .size_bytes = 4096};
}

class RendezvousTest : public ::testing::Test {
 protected:
  void Arrive(uint64_t key, int rank, int num_ranks, int64_t value,
              Outcome& outcome) {
    rendezvous_.Arrive(At(key, rank, num_ranks),
                       std::make_unique<TestMember>(value, &outcome),
                       &SumWork::Make);
  }

  Threads threads_;
  Rendezvous rendezvous_{seconds(600), threads_};
};

TEST_F(RendezvousTest, AllRanksGetTheExchange) {
  std::vector<Outcome> outcomes(4);
  for (int rank : {2, 0, 3, 1}) Arrive(7, rank, 4, 1 << rank, outcomes[rank]);
  for (Outcome& outcome : outcomes) {
    outcome.done.wait();
    EXPECT_EQ(outcome.status, OkStatus());
    EXPECT_EQ(outcome.sum, 15);
  }
  EXPECT_EQ(rendezvous_.num_open(), 0);
}

// As XLA does: its all-reduce waits inside `Done` for the other ranks' `Done`.
TEST_F(RendezvousTest, DoneMayWaitForTheOthersDone) {
  class Waits : public Member {
   public:
    explicit Waits(std::shared_ptr<std::latch> all) : all_(std::move(all)) {}
    void Done(const Status&) override { all_->arrive_and_wait(); }

   private:
    const std::shared_ptr<std::latch> all_;
  };
  class Nothing : public Work {
   public:
    int64_t num_pieces() const override { return 0; }
    void Run(int64_t) override {}
  };
  constexpr int kRanks = 8;
  const auto all = std::make_shared<std::latch>(kRanks + 1);
  for (int rank = 0; rank < kRanks; ++rank) {
    rendezvous_.Arrive(
        At(7, rank, kRanks), std::make_unique<Waits>(all),
        +[](Members) -> StatusOr<std::unique_ptr<Work>> {
          return std::unique_ptr<Work>(new Nothing);
        });
  }
  all->arrive_and_wait();
}

TEST_F(RendezvousTest, OneRankMeetsItself) {
  Outcome outcome;
  Arrive(1, 0, 1, 5, outcome);
  outcome.done.wait();
  EXPECT_EQ(outcome.sum, 5);
}

TEST_F(RendezvousTest, CallsThatInterleaveAreMatchedByKey) {
  std::vector<Outcome> a(2);
  std::vector<Outcome> b(2);
  Arrive(10, 0, 2, 1, a[0]);
  Arrive(11, 1, 2, 20, b[1]);
  Arrive(11, 0, 2, 10, b[0]);
  Arrive(10, 1, 2, 2, a[1]);
  for (Outcome& outcome : a) {
    outcome.done.wait();
    EXPECT_EQ(outcome.sum, 3);
  }
  for (Outcome& outcome : b) {
    outcome.done.wait();
    EXPECT_EQ(outcome.sum, 30);
  }
}

TEST_F(RendezvousTest, ARankThatComesAgainOpensTheNextMeeting) {
  std::vector<Outcome> first(2);
  std::vector<Outcome> second(2);
  Arrive(5, 0, 2, 1, first[0]);
  Arrive(5, 0, 2, 10, second[0]);
  EXPECT_EQ(rendezvous_.num_open(), 2);
  Arrive(5, 1, 2, 2, first[1]);
  Arrive(5, 1, 2, 20, second[1]);
  for (int r = 0; r < 2; ++r) {
    first[r].done.wait();
    second[r].done.wait();
    EXPECT_EQ(first[r].sum, 3);
    EXPECT_EQ(second[r].sum, 30);
  }
}

TEST_F(RendezvousTest, AMissingRankFailsAllPresentWithOneMessage) {
  std::vector<Outcome> outcomes(4);
  for (int rank : {0, 1, 3}) Arrive(9, rank, 4, 0, outcomes[rank]);
  rendezvous_.Expire(Rendezvous::Clock::now() + seconds(599));
  EXPECT_EQ(rendezvous_.num_open(), 1);
  rendezvous_.Expire(Rendezvous::Clock::now() + seconds(601));
  EXPECT_EQ(rendezvous_.num_open(), 0);
  for (int rank : {0, 1, 3}) {
    outcomes[rank].done.wait();
    EXPECT_EQ(outcomes[rank].status, outcomes[0].status);
  }
  EXPECT_EQ(outcomes[0].status.code(), StatusCode::kDeadlineExceeded);
  const std::string& message = outcomes[0].status.message();
  for (const char* part :
       {"sum over axis 'x'", "rank 2 of 4 did not come within 600 s",
        "ranks 0, 1, 3 waited for 4096 bytes",
        "JAX_TURBOBUS_EXCHANGE_TIMEOUT_S"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }

  // The one that comes late gets the same error, at once.
  Arrive(9, 2, 4, 0, outcomes[2]);
  outcomes[2].done.wait();
  EXPECT_EQ(outcomes[2].status, outcomes[0].status);
  EXPECT_EQ(rendezvous_.num_open(), 0);
}

TEST_F(RendezvousTest, AKeyWorksAgainAfterAllRanksHaveHadItsError) {
  std::vector<Outcome> failed(2);
  Arrive(3, 0, 2, 0, failed[0]);
  rendezvous_.Expire(Rendezvous::Clock::now() + seconds(601));
  Arrive(3, 1, 2, 0, failed[1]);
  std::vector<Outcome> good(2);
  Arrive(3, 0, 2, 1, good[0]);
  Arrive(3, 1, 2, 2, good[1]);
  for (Outcome& outcome : good) {
    outcome.done.wait();
    EXPECT_EQ(outcome.sum, 3);
  }
  for (Outcome& outcome : failed) {
    outcome.done.wait();
    EXPECT_FALSE(outcome.status.ok());
  }
}

TEST_F(RendezvousTest, ManyFailuresAreForgottenInTheEnd) {
  std::vector<Outcome> outcomes(5000);
  for (int i = 0; i < 5000; ++i) Arrive(100 + i, 0, 2, 0, outcomes[i]);
  rendezvous_.Expire(Rendezvous::Clock::now() + seconds(601));
  for (Outcome& outcome : outcomes) outcome.done.wait();
  EXPECT_EQ(rendezvous_.num_open(), 0);
}

TEST(RendezvousWatcherTest, TheWatcherFailsAMeetingInTime) {
  Threads threads;
  Rendezvous rendezvous(milliseconds(30), threads);
  for (int round = 0; round < 2; ++round) {
    Outcome outcome;
    const auto start = Rendezvous::Clock::now();
    rendezvous.Arrive(At(round, 0, 2),
                      std::make_unique<TestMember>(0, &outcome),
                      &SumWork::Make);
    outcome.done.wait();
    const auto waited = Rendezvous::Clock::now() - start;
    EXPECT_EQ(outcome.status.code(), StatusCode::kDeadlineExceeded);
    EXPECT_GE(waited, milliseconds(29));
    EXPECT_LT(waited, seconds(20));
  }
}

TEST(RendezvousWatcherTest, AShorterTimeoutHoldsForTheNextMeeting) {
  Threads threads;
  Rendezvous rendezvous(seconds(600), threads);
  Outcome patient;
  rendezvous.Arrive(At(1, 0, 2), std::make_unique<TestMember>(0, &patient),
                    &SumWork::Make);
  rendezvous.set_timeout(milliseconds(20));
  Outcome hasty;
  rendezvous.Arrive(At(2, 0, 2), std::make_unique<TestMember>(0, &hasty),
                    &SumWork::Make);
  hasty.done.wait();
  EXPECT_NE(hasty.status.message().find("0.02 s"), std::string::npos)
      << hasty.status;
  EXPECT_EQ(rendezvous.num_open(), 1);
  Outcome other;
  rendezvous.Arrive(At(1, 1, 2), std::make_unique<TestMember>(0, &other),
                    &SumWork::Make);
  patient.done.wait();
  other.done.wait();
  EXPECT_EQ(patient.status, OkStatus());
}

TEST(RendezvousWatcherTest, ThoseThatWaitAtTheEndAreCancelled) {
  Threads threads;
  Outcome outcome;
  {
    Rendezvous rendezvous(seconds(600), threads);
    rendezvous.Arrive(At(1, 0, 2), std::make_unique<TestMember>(0, &outcome),
                      &SumWork::Make);
  }
  outcome.done.wait();
  EXPECT_EQ(outcome.status.code(), StatusCode::kCancelled);
}

TEST_F(RendezvousTest, AnErrorOfThePlanReachesAllRanks) {
  std::vector<Outcome> outcomes(2);
  for (int r = 0; r < 2; ++r) {
    rendezvous_.Arrive(
        At(4, r, 2), std::make_unique<TestMember>(0, &outcomes[r]),
        +[](Members) -> StatusOr<std::unique_ptr<Work>> {
          return InvalidArgument("tokens differ");
        });
  }
  for (Outcome& outcome : outcomes) {
    outcome.done.wait();
    EXPECT_EQ(outcome.status,
              InvalidArgument("sum over axis 'x': tokens differ"));
  }
}

TEST_F(RendezvousTest, AMeetingWithTwoMeaningsIsRefused) {
  std::vector<Outcome> outcomes(3);
  Arrive(6, 0, 3, 0, outcomes[0]);
  Arrive(6, 1, 2, 0, outcomes[1]);
  outcomes[1].done.wait();
  EXPECT_EQ(outcomes[1].status.code(), StatusCode::kInternal);
  Arrive(8, 5, 3, 0, outcomes[2]);
  outcomes[2].done.wait();
  EXPECT_EQ(outcomes[2].status.code(), StatusCode::kInternal);
  rendezvous_.Expire(Rendezvous::Clock::now() + seconds(601));
  outcomes[0].done.wait();
}

// Ranks are threads that make their calls in orders of their own, and continue
// inside `Done` with calls that again wait for each other.
TEST_F(RendezvousTest, ThousandsOfCallsInAnyOrderFindEachOther) {
  constexpr int kRanks = 6;
  constexpr int kCalls = 300;
  std::vector<std::vector<Outcome>> outcomes(kRanks);
  for (auto& of_rank : outcomes) of_rank = std::vector<Outcome>(kCalls);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      std::vector<int> order(kCalls);
      for (int i = 0; i < kCalls; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), std::mt19937(rank));
      for (int call : order) {
        Arrive(1000 + call, rank, kRanks, call * 10 + rank,
               outcomes[rank][call]);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int call = 0; call < kCalls; ++call) {
      Outcome& outcome = outcomes[rank][call];
      outcome.done.wait();
      ASSERT_EQ(outcome.status, OkStatus());
      ASSERT_EQ(outcome.sum, kRanks * call * 10 + 15);
    }
  }
  EXPECT_EQ(rendezvous_.num_open(), 0);
}

TEST(RendezvousKeyTest, KeysAreNeverTheSame) {
  std::set<uint64_t> keys;
  for (int i = 0; i < 1000; ++i) keys.insert(Rendezvous::NewKey());
  EXPECT_EQ(keys.size(), 1000u);
}

}  // namespace
}  // namespace turbobus::moe

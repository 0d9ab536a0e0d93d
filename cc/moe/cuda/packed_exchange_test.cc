#include "moe/cuda/packed_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "moe/cuda/events.h"
#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/mail.h"
#include "moe/cuda/packed_cases.h"
#include "moe/cuda/packed_runs.h"
#include "moe/cuda/ring.h"
#include "moe/plan.h"

namespace turbobus::moe::cuda {
namespace {

using testing::Bytes;
using testing::Case;
using testing::CombineGradOf;
using testing::CombineOf;
using testing::DeviceBytes;
using testing::DispatchOf;
using testing::Elements;
using testing::ExpectOk;
using testing::ExpectSame;
using testing::How;
using testing::HowName;
using testing::IdsOf;
using testing::kCases;
using testing::MemoryOf;
using testing::MemoryOfAll;
using testing::OnRanks;
using testing::RankMemory;
using testing::Ranks;
using testing::Results;
using testing::RunAll;
using testing::ScratchFor;
using testing::WiringOf;

// Small slots, so that small batches go around the ring often; and GPUs that do
// not reach each other.
[[maybe_unused]] const int kSlots =
    setenv("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", "65536", /*overwrite=*/1);
[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

using PackedExchange = testing::GpuTest;

class PackedEqualsDirect
    : public PackedExchange,
      public ::testing::WithParamInterface<std::tuple<Case, How>> {};

TEST_P(PackedEqualsDirect, InEveryResultOfEveryExchange) {
  const auto& [one, how] = GetParam();
  ExpectSame(RunAll(one, how, 0x5a), RunAll(one, How::kDirect, 0xa5));
}

INSTANTIATE_TEST_SUITE_P(, PackedEqualsDirect,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(How::kMail,
                                                              How::kRing,
                                                              How::kBroadcast)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  HowName(std::get<1>(info.param));
                         });

/// The rows of a dispatch by the plan that CPU devices make.
Bytes RowsByThePlan(const Case& one, int rank) {
  const Shape shape = one.ShapeOf(rank);
  ExchangeShape plan_shape;
  plan_shape.num_ranks = one.num_ranks;
  plan_shape.num_experts = one.num_experts;
  plan_shape.num_tokens = one.num_tokens;
  plan_shape.top_k = one.top_k;
  plan_shape.recv_capacity = shape.num_rows;
  plan_shape.expert_capacity = one.expert_capacity;
  std::vector<std::vector<int32_t>> ids, places, counts;
  std::vector<const int32_t*> all_counts;
  for (int r = 0; r < one.num_ranks; ++r) {
    ids.push_back(IdsOf(one, r));
    places.emplace_back(ids[r].size());
    counts.emplace_back(one.num_experts);
    CountChoices(plan_shape, ids[r], places[r], counts[r]);
  }
  for (const auto& count : counts) all_counts.push_back(count.data());
  const RowPlan plan(plan_shape, all_counts);
  Bytes rows(shape.num_rows * shape.row_bytes);
  for (int r = 0; r < one.num_ranks; ++r) {
    const Bytes tokens =
        Elements(one.dtype, int64_t{one.num_tokens} * one.hidden, 100 + r);
    for (size_t slot = 0; slot < ids[r].size(); ++slot) {
      const int32_t id = ids[r][slot];
      if (places[r][slot] == kNoRow || plan_shape.rank_of(id) != rank) continue;
      const int32_t row = plan.row(r, id, places[r][slot]);
      if (row == kNoRow) continue;
      const int64_t token = static_cast<int64_t>(slot) / one.top_k;
      std::memcpy(&rows[row * shape.row_bytes],
                  &tokens[token * shape.row_bytes], shape.row_bytes);
    }
  }
  return rows;
}

TEST_F(PackedExchange, DispatchGivesTheRowsOfThePlan) {
  for (const Case& one : kCases) {
    if (one.num_tokens == 0) continue;
    for (const How how : {How::kDirect, How::kRing}) {
      const Results results = RunAll(one, how, 0x5a);
      for (int r = 0; r < one.num_ranks; ++r) {
        const std::string name = "rows of rank " + std::to_string(r);
        const auto found = std::find_if(
            results.of.begin(), results.of.end(),
            [&](const auto& entry) { return entry.first == name; });
        ASSERT_NE(found, results.of.end());
        EXPECT_TRUE(found->second == RowsByThePlan(one, r))
            << one << HowName(how) << ", " << name;
      }
    }
  }
}

/// Whose slots are in the same memory, in the same run.
TEST_F(PackedExchange, StepsOfALoopDoNotTakeEachOthersTotals) {
  const Case first = {
      .name = "", .num_ranks = 3, .num_tokens = 200, .num_experts = 6};
  Case second = first;
  second.routing = "skewed";
  const Results want = RunAll(second, How::kDirect, 0xa5);
  for (const How how : {How::kRing, How::kBroadcast}) {
    Ranks ranks(WiringOf(first.num_ranks, how), std::chrono::seconds(20));
    std::vector<RankMemory> memory = MemoryOfAll(first, ranks);
    ExpectOk(testing::RunExchanges(first, ranks, memory, /*is_counted=*/true));
    for (int r = 0; r < first.num_ranks; ++r) {
      (void)cudaSetDevice(ranks.devices()[r]);
      memory[r].ids = DeviceBytes(testing::ToBytes(IdsOf(second, r)));
    }
    ExpectOk(testing::RunExchanges(second, ranks, memory, /*is_counted=*/true));
    ExpectSame(testing::ResultsOf(second, memory), want);
  }
}

/// Dispatches one after the other, none of which is waited for, on streams in
/// turn: what they share must keep itself in order.
TEST_F(PackedExchange, ManyCallsInARowOnSeveralStreams) {
  constexpr int kStreams = 3;
  constexpr int kCalls = 60;
  const Case one = {.name = "",
                    .num_ranks = 3,
                    .num_tokens = 300,
                    .num_experts = 6,
                    .hidden = 256};
  const Results want = RunAll(one, How::kDirect, 0xa5);
  for (const How how : {How::kMail, How::kRing, How::kBroadcast}) {
    Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::seconds(20));
    std::vector<std::vector<RankMemory>> memory(kStreams);
    std::vector<std::vector<cudaStream_t>> streams(kStreams);
    for (int s = 0; s < kStreams; ++s) {
      for (int r = 0; r < one.num_ranks; ++r) {
        RankMemory& own = memory[s].emplace_back(MemoryOf(one, ranks, r, 0x5a));
        Caller caller = ranks.CallerOf(r, 0);
        const GpuDispatch dispatch = DispatchOf(one, r, own);
        ScratchFor(caller, dispatch, own);
        const GpuCombine combine = CombineOf(one, r, own, true);
        ScratchFor(caller, combine, own);
        (void)cudaStreamCreateWithFlags(&streams[s].emplace_back(),
                                        cudaStreamNonBlocking);
      }
    }
    ExpectOk(OnRanks(ranks.devices(), [&](int rank) -> Status {
      for (int i = 0; i < kCalls; ++i) {
        Caller caller = ranks.CallerOf(rank, 1000 + 2 * i);
        caller.stream = streams[i % kStreams][rank];
        RankMemory& own = memory[i % kStreams][rank];
        GpuDispatch dispatch = DispatchOf(one, rank, own);
        dispatch.scratch = own.scratch[0].as();
        TB_RETURN_IF_ERROR(RunDispatch(caller, dispatch));
        ++caller.key.position;
        GpuCombine combine = CombineOf(one, rank, own, true);
        combine.scratch = own.scratch[1].as();
        TB_RETURN_IF_ERROR(RunCombine(caller, combine));
      }
      return OkStatus();
    }));
    ASSERT_EQ(testing::Synchronize(), cudaSuccess);
    for (int s = 0; s < kStreams; ++s) {
      for (int r = 0; r < one.num_ranks; ++r) {
        EXPECT_TRUE(memory[s][r].rows.Read() == want.of[8 * r].second)
            << HowName(how) << ": rows of rank " << r;
        EXPECT_TRUE(memory[s][r].sums.Read() == want.of[8 * r + 4].second)
            << HowName(how) << ": sums of rank " << r;
        (void)cudaStreamDestroy(streams[s][r]);
      }
    }
  }
}

/// Pinned memory, events and device memory, once calls have had what they need.
std::tuple<int64_t, int64_t, int64_t, size_t> InUse() {
  size_t free = 0;
  size_t total = 0;
  (void)cudaMemGetInfo(&free, &total);
  return {MailPool::Process().total_bytes(), RingPool::Process().total_bytes(),
          EventPool::Process().num_made(), total - free};
}

TEST_F(PackedExchange, ThousandsOfCallsKeepNothing) {
  const char* const wanted = std::getenv("TURBOBUS_TEST_CALLS");
  const int num_calls = wanted == nullptr ? 300 : std::atoi(wanted);
  const Case one = {.name = "", .num_tokens = 32, .hidden = 64};
  for (const How how : {How::kMail, How::kRing, How::kBroadcast}) {
    Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::seconds(20));
    std::vector<RankMemory> memory;
    for (int r = 0; r < one.num_ranks; ++r) {
      RankMemory& own = memory.emplace_back(MemoryOf(one, ranks, r, 0x5a));
      const Caller caller = ranks.CallerOf(r, 0);
      ScratchFor(caller, DispatchOf(one, r, own), own);
      ScratchFor(caller, CombineOf(one, r, own, true), own);
      ScratchFor(caller, CombineGradOf(one, r, own), own);
    }
    int64_t position = 1;
    const auto calls = [&](int count) {
      ExpectOk(OnRanks(ranks.devices(), [&](int rank) -> Status {
        RankMemory& own = memory[rank];
        for (int i = 0; i < count; ++i) {
          Caller caller = ranks.CallerOf(rank, position + 3 * i);
          GpuDispatch dispatch = DispatchOf(one, rank, own);
          dispatch.scratch = own.scratch[0].as();
          TB_RETURN_IF_ERROR(RunDispatch(caller, dispatch));
          ++caller.key.position;
          GpuCombine combine = CombineOf(one, rank, own, true);
          combine.scratch = own.scratch[1].as();
          TB_RETURN_IF_ERROR(RunCombine(caller, combine));
          ++caller.key.position;
          GpuCombineGrad grad = CombineGradOf(one, rank, own);
          grad.scratch = own.scratch[2].as();
          TB_RETURN_IF_ERROR(RunCombineGrad(caller, grad));
        }
        return OkStatus();
      }));
      position += 3 * count;
      EXPECT_EQ(testing::Synchronize(), cudaSuccess);
    };
    // How many are under way at once is up to the host's threads.
    calls(100);
    const auto before = InUse();
    calls(num_calls);
    const auto after = InUse();
    EXPECT_LE(std::get<0>(after), std::get<0>(before) + (1 << 20))
        << HowName(how);
    EXPECT_LE(std::get<1>(after), std::get<1>(before) + (1 << 20));
    EXPECT_LE(std::get<2>(after), std::get<2>(before) + 32);
    EXPECT_LE(std::get<3>(after), std::get<3>(before) + (4 << 20));
  }
}

TEST_F(PackedExchange, ARankThatDoesNotComeIsNamedByAllInTime) {
  const Case one = {.name = "", .num_ranks = 3, .num_experts = 6};
  for (const How how : {How::kMail, How::kRing, How::kBroadcast}) {
    Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::milliseconds(300));
    std::vector<RankMemory> memory = MemoryOfAll(one, ranks);
    const auto start = std::chrono::steady_clock::now();
    const std::vector<Status> said = ranks.Call([&](const Caller& caller) {
      if (caller.rank == 1) return OkStatus();
      return testing::Dispatch(one, caller, memory[caller.rank]);
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::seconds(5));
    for (const int rank : {0, 2}) {
      EXPECT_EQ(said[rank].code(), StatusCode::kDeadlineExceeded);
      EXPECT_NE(said[rank].message().find("rank(s) 1"), std::string::npos)
          << said[rank];
    }
  }
}

TEST_F(PackedExchange, AGpuThatDoesNotGetToItFailsAllRanksInTime) {
  const Case one = {.name = ""};
  Ranks ranks(WiringOf(one.num_ranks, How::kRing),
              std::chrono::milliseconds(300));
  std::vector<RankMemory> memory = MemoryOfAll(one, ranks);
  const auto dispatch = [&](const Caller& caller) {
    return testing::Dispatch(one, caller, memory[caller.rank]);
  };
  const std::vector<Status> said = ranks.Call([&](const Caller& caller) {
    if (caller.rank == 0) {
      (void)cudaLaunchHostFunc(
          caller.stream,
          [](void*) { std::this_thread::sleep_for(std::chrono::seconds(1)); },
          nullptr);
    }
    return dispatch(caller);
  });
  for (const Status& status : said) {
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  }
  ExpectOk(ranks.Call(dispatch));
}

TEST(RingSize, RefusesWhatIsNoSize) {
  setenv("JAX_TURBOBUS_EXCHANGE_SLOTS", "many", 1);
  const auto size = RingSize::FromEnvironment();
  unsetenv("JAX_TURBOBUS_EXCHANGE_SLOTS");
  ASSERT_FALSE(size.ok());
  EXPECT_EQ(size.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(size.status().message().find("JAX_TURBOBUS_EXCHANGE_SLOTS"),
            std::string::npos);
}

}  // namespace
}  // namespace turbobus::moe::cuda

#include "moe/cuda/gpu_traffic.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/packed_cases.h"
#include "moe/cuda/packed_runs.h"

// What exchanges count is what a slow look at their tables finds.

namespace turbobus::moe::cuda {
namespace {

using testing::Case;
using testing::CombineOf;
using testing::DispatchOf;
using testing::ExpectOk;
using testing::How;
using testing::HowName;
using testing::IdsOf;
using testing::kCases;
using testing::MemoryOfAll;
using testing::RankMemory;
using testing::Ranks;
using testing::RunExchanges;
using testing::ScratchFor;
using testing::WiringOf;

[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

/// [num_ranks, num_ranks]: the tokens' rank, the rows' rank.
struct SlowCount {
  std::vector<int64_t> tokens;   // With a row there.
  std::vector<int64_t> copies;   // Rows there.
  std::vector<int64_t> choices;  // That have a row there.

  SlowCount(const Case& one, const std::vector<RankMemory>& memory)
      : tokens(one.num_ranks * one.num_ranks),
        copies(tokens.size()),
        choices(tokens.size()) {
    for (int r = 0; r < one.num_ranks; ++r) {
      const std::vector<int32_t> ids = IdsOf(one, r);
      const testing::Bytes bytes = memory[r].slots.Read();
      std::vector<int32_t> slots(ids.size());
      std::memcpy(slots.data(), bytes.data(), bytes.size());
      for (int t = 0; t < one.num_tokens; ++t) {
        std::set<int> ranks;
        std::set<int32_t> experts;
        for (int j = t * one.top_k; j < (t + 1) * one.top_k; ++j) {
          if (ids[j] < 0 || ids[j] >= one.num_experts || slots[j] < 0) continue;
          const int to = ids[j] * one.num_ranks / one.num_experts;
          if (to == r) continue;
          const int pair = r * one.num_ranks + to;
          ++choices[pair];
          if (ranks.insert(to).second) ++tokens[pair];
          if (experts.insert(ids[j]).second) ++copies[pair];
        }
      }
    }
  }
};

std::vector<int64_t> Times(const std::vector<int64_t>& counts, int64_t factor) {
  std::vector<int64_t> product;
  for (const int64_t count : counts) product.push_back(count * factor);
  return product;
}

std::vector<int64_t> Transposed(const std::vector<int64_t>& of, int num_ranks) {
  std::vector<int64_t> result;
  for (int from = 0; from < num_ranks; ++from) {
    for (int to = 0; to < num_ranks; ++to) {
      result.push_back(of[to * num_ranks + from]);
    }
  }
  return result;
}

std::vector<Traffic> Read() {
  auto traffic = GpuTraffic::Process().Read();
  EXPECT_TRUE(traffic.ok()) << traffic.status();
  return traffic.ok() ? *traffic : std::vector<Traffic>();
}

class GpuTrafficTest : public testing::GpuTest {
 protected:
  void SetUp() override {
    testing::GpuTest::SetUp();
    if (IsSkipped()) return;
    const Status status = GpuTraffic::Process().Reset();
    ASSERT_TRUE(status.ok()) << status;
  }
};

class GpuTrafficCases
    : public GpuTrafficTest,
      public ::testing::WithParamInterface<std::tuple<Case, How>> {};

TEST_P(GpuTrafficCases, AreCountedByRanksAndPath) {
  const auto& [one, how] = GetParam();
  constexpr int kRounds = 2;
  Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::seconds(20));
  std::vector<RankMemory> memory = MemoryOfAll(one, ranks);
  for (int i = 0; i < kRounds; ++i) ExpectOk(RunExchanges(one, ranks, memory));

  const SlowCount count(one, memory);
  const Shape shape = one.ShapeOf(0);
  const int64_t weight_bytes = one.dtype == DType::kF64 ? 8 : 4;
  const std::vector<Traffic> traffic = Read();
  ASSERT_EQ(traffic.size(), one.dtype == DType::kOther ? 1u : 4u);
  for (const Traffic& kind : traffic) {
    SCOPED_TRACE(kind.op);
    EXPECT_EQ(kind.num_calls, kRounds);
    EXPECT_EQ(kind.num_ranks, one.num_ranks);
    const bool is_broadcast = how == How::kBroadcast && kind.op == "dispatch";
    EXPECT_EQ(kind.schedule, how == How::kDirect ? Schedule::kDirect
                             : is_broadcast      ? Schedule::kBroadcast
                                                 : Schedule::kPacked);
    EXPECT_EQ(kind.path, how == How::kDirect ? "peer"
                         : how == How::kMail ? "mail"
                                             : "host");
    std::vector<int64_t> want = Times(count.tokens, shape.row_bytes);
    if (is_broadcast) {
      for (int pair = 0; pair < one.num_ranks * one.num_ranks; ++pair) {
        const bool is_own = pair % (one.num_ranks + 1) == 0;
        want[pair] = is_own ? 0 : one.num_tokens * shape.row_bytes;
      }
    }
    if (kind.op == "combine" || kind.op == "dispatch_grad") {
      want = Transposed(want, one.num_ranks);
    }
    if (kind.op == "combine_grad") {
      const std::vector<int64_t> back =
          Transposed(Times(count.choices, weight_bytes), one.num_ranks);
      for (size_t i = 0; i < want.size(); ++i) want[i] += back[i];
    }
    EXPECT_EQ(kind.bytes, Times(want, kRounds));
  }
  const Status status = GpuTraffic::Process().Reset();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Read().empty());
}

INSTANTIATE_TEST_SUITE_P(
    , GpuTrafficCases,
    ::testing::Combine(::testing::ValuesIn(kCases),
                       ::testing::Values(How::kDirect, How::kMail, How::kRing,
                                         How::kBroadcast)),
    [](const auto& info) {
      return std::get<0>(info.param).name + HowName(std::get<1>(info.param));
    });

TEST_F(GpuTrafficTest, ARowACopyIsCountedACopy) {
  const Case one = {.name = "", .num_tokens = 300, .top_k = 4};
  Ranks ranks(WiringOf(one.num_ranks, How::kDirect), std::chrono::seconds(20));
  std::vector<RankMemory> memory = MemoryOfAll(one, ranks);
  ExpectOk(ranks.Call([&](const Caller& caller) {
    RankMemory& own = memory[caller.rank];
    GpuDispatch call = DispatchOf(one, caller.rank, own);
    call.is_deduplicated = false;
    call.scratch = ScratchFor(caller, call, own);
    return RunDispatch(caller, call);
  }));
  const SlowCount count(one, memory);
  ASSERT_NE(count.copies, count.tokens);
  const std::vector<Traffic> traffic = Read();
  ASSERT_EQ(traffic.size(), 1u);
  EXPECT_EQ(traffic[0].bytes, Times(count.copies, one.ShapeOf(0).row_bytes));
}

TEST_F(GpuTrafficTest, BatchesAreOneCallAndRelaysASchedule) {
  const Case one = {.name = ""};
  Wiring wiring = WiringOf(one.num_ranks, How::kRing);
  wiring.has_relays = true;
  Ranks ranks(wiring, std::chrono::seconds(20));
  std::vector<RankMemory> memory = MemoryOfAll(one, ranks);
  for (int batch = 0; batch < 3; ++batch) {
    ExpectOk(ranks.Call([&](Caller caller) {
      caller.batch = batch;
      return testing::Dispatch(one, caller, memory[caller.rank]);
    }));
  }
  const std::vector<Traffic> traffic = Read();
  ASSERT_EQ(traffic.size(), 1u);
  EXPECT_EQ(traffic[0].num_calls, 1);
  EXPECT_EQ(traffic[0].schedule, Schedule::kRelay);
  EXPECT_EQ(traffic[0].path, "host");  // No GPU here reaches another.
  const SlowCount count(one, memory);
  EXPECT_EQ(traffic[0].bytes,
            Times(count.tokens, 3 * one.ShapeOf(0).row_bytes));
}

/// Calls of `num_kinds` groups of devices, or numbers of ranks.
StatusOr<std::vector<Traffic>> ReadAfter(
    int num_kinds, const std::function<GpuTraffic::Kind(int)>& kind_of) {
  GpuTraffic traffic;
  for (int i = 0; i < num_kinds; ++i) {
    const Caller caller = {.op = "", .device = -1, .key = {}, .wiring = {}};
    TB_RETURN_IF_ERROR(traffic.Count(caller, kind_of(i),
                                     [](const Tally&) { return OkStatus(); }));
  }
  return traffic.Read();
}

TEST(GpuTraffic, GroupsOfGpusThatAreConnectedAlikeShareCounters) {
  // Each by itself would have four.
  constexpr int kGroups = kNumTrafficCounters / 4 + 1;
  const auto traffic = ReadAfter(kGroups, [](int i) {
    return GpuTraffic::Kind{.schedule = Schedule::kPacked,
                            .means = GpuTraffic::Means::kRings,
                            .num_ranks = 2,
                            .devices = {i, i + 1}};
  });
  ASSERT_TRUE(traffic.ok()) << traffic.status();
  ASSERT_EQ(traffic->size(), 1u);
  EXPECT_EQ((*traffic)[0].num_calls, kGroups);
  EXPECT_EQ((*traffic)[0].path, "host");
}

TEST(GpuTraffic, WithoutCountersForAllItSaysSo) {
  // 1² + 2² + … + 46² are more than there are.
  const auto traffic = ReadAfter(46, [](int i) {
    return GpuTraffic::Kind{.num_ranks = i + 1, .devices = {}};
  });
  EXPECT_EQ(traffic.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(traffic.status().message().find("32768 counters"),
            std::string::npos)
      << traffic.status();
}

TEST_F(GpuTrafficTest, ARankAloneSendsNobodyAnything) {
  const Case one = {.name = "", .num_ranks = 1};
  Ranks ranks(WiringOf(1, How::kDirect), std::chrono::seconds(20));
  std::vector<RankMemory> memory = MemoryOfAll(one, ranks);
  ExpectOk(RunExchanges(one, ranks, memory));
  const std::vector<Traffic> traffic = Read();
  ASSERT_EQ(traffic.size(), 4u);
  for (const Traffic& kind : traffic) {
    EXPECT_EQ(kind.num_calls, 1);
    EXPECT_EQ(kind.bytes, std::vector<int64_t>{0});
  }
}

}  // namespace
}  // namespace turbobus::moe::cuda

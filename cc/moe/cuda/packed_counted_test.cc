#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "moe/cuda/known_totals.h"
#include "moe/cuda/mail.h"
#include "moe/cuda/packed_exchange.h"
#include "moe/cuda/packed_runs.h"
#include "moe/cuda/total_faults.h"

// Exchanges by rings whose host knows from their dispatch how many rows there
// are, and what happens where it does not, or is wrong.

namespace turbobus::moe::cuda {
namespace {

using testing::Case;
using testing::CombineGradOf;
using testing::CombineOf;
using testing::DeviceBytes;
using testing::DispatchOf;
using testing::ExpectOk;
using testing::ExpectSame;
using testing::How;
using testing::kCases;
using testing::MemoryOfAll;
using testing::OnRanks;
using testing::RankMemory;
using testing::Ranks;
using testing::RunAll;
using testing::ScratchFor;
using testing::WiringOf;

[[maybe_unused]] const int kSlots =
    setenv("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", "65536", /*overwrite=*/1);
[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

const Case kOne = {.name = "",
                   .num_ranks = 3,
                   .num_tokens = 200,
                   .num_experts = 6,
                   .hidden = 128};

using PackedCounted = testing::GpuTest;

/// Ranks that have dispatched `kOne`, and may combine.
struct Dispatched {
  Ranks ranks{WiringOf(kOne.num_ranks, How::kRing), std::chrono::seconds(20)};
  std::vector<RankMemory> memory = MemoryOfAll(kOne, ranks);

  Dispatched() {
    for (int r = 0; r < kOne.num_ranks; ++r) {
      // Allocating would wait for the GPU.
      const Caller caller = ranks.CallerOf(r, 0);
      ScratchFor(caller, DispatchOf(kOne, r, memory[r]), memory[r]);
      ScratchFor(caller, CombineOf(kOne, r, memory[r], true), memory[r]);
    }
    // Once to warm up: CUDA waits for the GPU when it loads a kernel.
    DispatchAll();
    ExpectOk(ranks.Call(
        [&](const Caller& caller) { return Combine(caller, false); }));
    DispatchAll();
  }

  void DispatchAll() {
    ExpectOk(
        ranks.Call([&](const Caller& caller) { return Dispatch(caller); }));
  }

  Status Dispatch(const Caller& caller, const void* early = nullptr) {
    RankMemory& own = memory[caller.rank];
    GpuDispatch call = DispatchOf(kOne, caller.rank, own);
    call.early = early;
    call.scratch = own.scratch[0].as();
    return RunDispatch(caller, call);
  }

  Status Combine(const Caller& caller, bool is_counted) {
    RankMemory& own = memory[caller.rank];
    GpuCombine call = CombineOf(kOne, caller.rank, own, true);
    call.is_counted = is_counted;
    call.scratch = own.scratch[1].as();
    return RunCombine(caller, call);
  }

  /// Calls while every rank's GPU is busy; whether all had enqueued the call
  /// before their GPU was free.
  bool IsAhead(const std::function<Status(Caller)>& call) {
    std::atomic<int> num_enqueued = 0;
    testing::Gate gate;
    std::future<bool> is_ahead =
        gate.OpenWhen([&] { return num_enqueued == kOne.num_ranks; },
                      std::chrono::milliseconds(500));
    const auto said = ranks.Call([&](const Caller& caller) {
      gate.Block(caller.stream);
      const Status status = call(caller);
      ++num_enqueued;
      return status;
    });
    ExpectOk(said);
    return is_ahead.get();
  }

  bool CombinesAhead(int64_t run_id, bool is_counted) {
    return IsAhead([&](Caller caller) {
      caller.key.run_id = run_id;
      return Combine(caller, is_counted);
    });
  }
};

/// Counts the dispatch of a case on all ranks twice, as two parts; returns by
/// rank what the second is known by.
std::vector<DeviceBytes> CountEarly(const Case& one, Ranks& ranks,
                                    const std::vector<RankMemory>& memory) {
  std::vector<DeviceBytes> early[2];
  for (int r = 0; r < one.num_ranks; ++r) {
    (void)cudaSetDevice(ranks.devices()[r]);
    for (auto& slots : early) {
      slots.emplace_back(int64_t{4} * one.num_tokens * one.top_k + 4, 0x5a);
    }
  }
  std::vector<DeviceBytes> scratch(one.num_ranks);
  ExpectOk(ranks.Call([&](const Caller& caller) {
    const int rank = caller.rank;
    GpuCount call;
    call.shape = one.ShapeOf(rank);
    for (const auto& slots : early) {
      call.parts.push_back(
          {memory[rank].ids.as<int32_t>(), slots[rank].as<int32_t>()});
    }
    scratch[rank] = DeviceBytes::Scratch(ScratchBytes(caller, call));
    call.scratch = scratch[rank].as();
    return RunCount(caller, call);
  }));
  return std::move(early[1]);
}

class PackedCountedCases : public PackedCounted,
                           public ::testing::WithParamInterface<Case> {};

TEST_P(PackedCountedCases, GiveTheBitsOfDirectOnes) {
  ExpectSame(RunAll(GetParam(), How::kRing, 0x5a, /*is_counted=*/true),
             RunAll(GetParam(), How::kDirect, 0xa5));
}

INSTANTIATE_TEST_SUITE_P(Small, PackedCountedCases, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// Of so many bytes that what goes to a peer is summed up in parts.
const Case kLarge[] = {
    {.name = "FourParts",
     .num_tokens = 6000,
     .hidden = 1024,
     .num_rows = 13000},
    {.name = "TwoPartsOfThreeRanks",
     .num_ranks = 3,
     .num_tokens = 5000,
     .num_experts = 9,
     .hidden = 1024,
     .routing = "masked",
     .num_rows = 11000},
};

INSTANTIATE_TEST_SUITE_P(Large, PackedCountedCases, ::testing::ValuesIn(kLarge),
                         [](const auto& info) { return info.param.name; });

TEST_P(PackedCountedCases, DispatchTheSameWhenTheyWereCountedEarly) {
  const Case& one = GetParam();
  for (const How how : {How::kRing, How::kBroadcast, How::kMail}) {
    Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::seconds(20));
    std::vector<RankMemory> memory = MemoryOfAll(one, ranks);
    const auto early = CountEarly(one, ranks, memory);
    ExpectOk(ranks.Call([&](const Caller& caller) {
      RankMemory& own = memory[caller.rank];
      GpuDispatch call = DispatchOf(one, caller.rank, own);
      call.early = early[caller.rank].as();
      call.scratch = ScratchFor(caller, call, own);
      return RunDispatch(caller, call);
    }));
    const testing::Results want = RunAll(one, How::kDirect, 0xa5);
    const size_t each = want.of.size() / one.num_ranks;
    for (int r = 0; r < one.num_ranks; ++r) {
      EXPECT_TRUE(memory[r].rows.Read() == want.of[each * r].second);
      EXPECT_TRUE(memory[r].slots.Read() == want.of[each * r + 3].second);
    }
    // What the host was told is so: a kernel would have said otherwise.
    EXPECT_TRUE(TotalFaults::Process().Take(ranks.devices()[0]).ok());
  }
}

TEST_F(PackedCounted, ADispatchThatWasCountedIsEnqueuedWhileTheGpuIsBusy) {
  Dispatched all;
  const auto early = CountEarly(kOne, all.ranks, all.memory);
  EXPECT_TRUE(all.IsAhead([&](const Caller& caller) {
    return all.Dispatch(caller, early[caller.rank].as());
  }));
  EXPECT_FALSE(
      all.IsAhead([&](const Caller& caller) { return all.Dispatch(caller); }));
}

TEST_F(PackedCounted, WhatWasCountedEarlyGivesItsMailBackWhenItIsUsed) {
  Dispatched all;
  std::vector<DeviceBytes> early;
  for (int r = 0; r < kOne.num_ranks; ++r) {
    (void)cudaSetDevice(all.ranks.devices()[r]);
    early.emplace_back(int64_t{4} * kOne.num_tokens * kOne.top_k, 0x5a);
  }
  const auto runs = [&](int64_t first, int64_t last) {
    for (int64_t run = first; run < last; ++run) {
      ExpectOk(all.ranks.Call([&](Caller caller) -> Status {
        caller.key.run_id = run;
        GpuCount call;
        call.shape = kOne.ShapeOf(caller.rank);
        call.parts = {{all.memory[caller.rank].ids.as<int32_t>(),
                       early[caller.rank].as<int32_t>()}};
        const DeviceBytes memory =
            DeviceBytes::Scratch(ScratchBytes(caller, call));
        call.scratch = memory.as();
        TB_RETURN_IF_ERROR(RunCount(caller, call));
        ++caller.key.position;
        TB_RETURN_IF_ERROR(all.Dispatch(caller, early[caller.rank].as()));
        return FromCuda(cudaStreamSynchronize(caller.stream), "a run");
      }));
    }
  };
  runs(100, 110);
  const int64_t before = MailPool::Process().total_bytes();
  runs(110, 150);
  EXPECT_EQ(MailPool::Process().total_bytes(), before);
}

TEST_F(PackedCounted, ACombineIsEnqueuedWhileTheGpuIsBusy) {
  Dispatched all;
  EXPECT_TRUE(all.CombinesAhead(1, /*is_counted=*/true));
}

TEST_F(PackedCounted, ACombineThatDoesNotKnowItsDispatchWaits) {
  Dispatched all;
  EXPECT_FALSE(all.CombinesAhead(1, /*is_counted=*/false));
}

TEST_F(PackedCounted, ADispatchOfAnotherRunIsNotKnown) {
  Dispatched all;
  EXPECT_FALSE(all.CombinesAhead(2, /*is_counted=*/true));
}

TEST_F(PackedCounted, AGradientOfDispatchKnowsWhatThatOfCombineHasCounted) {
  Dispatched all;
  constexpr int64_t kRun = 3;  // In which nobody has dispatched.
  ExpectOk(all.ranks.Call([&](Caller caller) {
    caller.key.run_id = kRun;
    RankMemory& own = all.memory[caller.rank];
    GpuCombineGrad call = CombineGradOf(kOne, caller.rank, own);
    call.is_counted = false;
    call.scratch = ScratchFor(caller, call, own);
    return RunCombineGrad(caller, call);
  }));
  EXPECT_TRUE(all.CombinesAhead(kRun, /*is_counted=*/true));
}

TEST_F(PackedCounted, OneRankMayNotKnowWhatOthersDo) {
  Dispatched all;
  ExpectOk(all.ranks.Call([&](const Caller& caller) {
    return all.Combine(caller, /*is_counted=*/caller.rank != 1);
  }));
  Dispatched want;
  ExpectOk(want.ranks.Call(
      [&](const Caller& caller) { return want.Combine(caller, false); }));
  for (int r = 0; r < kOne.num_ranks; ++r) {
    EXPECT_TRUE(all.memory[r].sums.Read() == want.memory[r].sums.Read());
  }
}

TEST_F(PackedCounted, WrongTotalsAreToldOfByTheNextCallOnAllRanksOnce) {
  Dispatched all;
  RankMemory& own = all.memory[2];
  const std::vector<int>& devices = all.ranks.devices();
  const KnownTotals::Key key = {devices[2], 1, own.slots.as()};
  auto record = KnownTotals::Process().Find(key, kOne.ShapeOf(2), devices);
  ASSERT_TRUE(record.has_value());
  const auto wrong = std::make_shared<std::vector<int32_t>>(
      record->totals.get(), record->totals.get() + kOne.num_ranks);
  const int32_t found = (*wrong)[0];
  (*wrong)[0] = 1;
  record->totals = {wrong, wrong->data()};
  KnownTotals::Process().Put(key, *record);

  ExpectOk(all.ranks.Call(
      [&](const Caller& caller) { return all.Combine(caller, true); }));
  // Ranks that share a GPU share what is found on it: any one says it.
  const auto said = all.ranks.Call(
      [&](const Caller& caller) { return all.Combine(caller, false); });
  const std::string numbers =
      "rows of 1 tokens to or from rank 0, where there "
      "are " +
      std::to_string(found);
  for (const Status& status : said) {
    EXPECT_EQ(status.code(), StatusCode::kInternal) << status;
    EXPECT_NE(status.message().find(numbers), std::string::npos) << status;
  }
  ExpectOk(all.ranks.Call(
      [&](const Caller& caller) { return all.Combine(caller, false); }));
}

}  // namespace
}  // namespace turbobus::moe::cuda

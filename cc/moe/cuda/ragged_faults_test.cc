#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "moe/cuda/gpu_ragged.h"
#include "moe/cuda/ragged_testing.h"

// Slices that do not fit, and ranks that do not come.

namespace turbobus::moe::cuda {
namespace {

using RaggedFaultsTest = GpuRaggedTest;
using testing::OnRanks;
using testing::Ranks;

TEST_F(RaggedFaultsTest, ASliceThatDoesNotFitMovesNothingAndTheNextCallSaysSo) {
  const RaggedSizes sizes = {.num_ranks = 2,
                             .num_slices = 4,
                             .operand_rows = 100,
                             .output_rows = 120,
                             .row_bytes = 48};
  struct Wrong {
    int field;
    int32_t value;
    const char* message;
  };
  constexpr int32_t kMost = 2147483647;
  for (const Wrong& wrong : std::initializer_list<Wrong>{
           {0, -1, "stay within the operand's 100 rows"},
           {0, 98, "stay within the operand's 100 rows"},
           {0, kMost, "stay within the operand's 100 rows"},
           {1, -3, "must not be negative"},
           {1, kMost, "stay within the operand's 100 rows"},
           {2, -1, "stay within the result's 120 rows"},
           {2, 118, "stay within the result's 120 rows"},
           {2, kMost, "stay within the result's 120 rows"},
           {3, 4, "expects recv_sizes"}}) {
    SCOPED_TRACE(wrong.message);
    Problem good = MakeProblem(sizes, Kind::kDisjoint, 5);
    // Slice 2 of rank 0: three rows for rank 1.
    good.At(0, 0, 0, 2) = 10;
    good.At(0, 0, 1, 2) = 3;
    good.At(0, 0, 2, 2) = 7;
    good.At(1, 0, 3, 0) = 3;
    Problem bad = good;
    if (wrong.field == 3) {
      bad.At(1, 0, 3, 0) = wrong.value;
    } else {
      bad.At(0, 0, wrong.field, 2) = wrong.value;
    }
    Problem without = good;
    without.At(0, 0, 1, 2) = without.At(1, 0, 3, 0) = 0;
    ExpectSame(RunOnGpus(bad, DType::kOther), SlowPush(without));

    const Outcome told = RunOnGpus(good, DType::kOther);
    for (const Status& status : told.statuses) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
      const std::string text(status.message());
      EXPECT_NE(text.find("slice 2 of rank 0, for rank 1"), std::string::npos)
          << text;
      EXPECT_NE(text.find(wrong.message), std::string::npos) << text;
    }
    EXPECT_EQ(told.results, good.results);  // Nothing ran.
    ExpectSame(RunOnGpus(good, DType::kOther), SlowPush(good));

    // A transpose takes such a slice for one that was not sent.
    Problem sum = MakeProblem(sizes, Kind::kDisjoint, 6, true);
    FillWithNumbers<float>(sum.sources, 6);
    bad.sources = without.sources = sum.sources;
    bad.results = without.results = sum.results;
    ExpectSame(
        RunOnGpus(bad, DType::kF32),
        RunOnCpu(without, RaggedDirection::kTranspose, RowElement::kFloat32));
  }
}

/// Keeps a stream from going on until `gate` is open.
void Hold(cudaStream_t stream, std::atomic<bool>& gate) {
  EXPECT_EQ(
      cudaLaunchHostFunc(
          stream,
          [](void* at) { static_cast<std::atomic<bool>*>(at)->wait(false); },
          &gate),
      cudaSuccess);
}

void Open(std::atomic<bool>& gate) {
  gate = true;
  gate.notify_all();
}

TEST_F(RaggedFaultsTest, WhatWasUnderWayWhenAMisfitWasToldOfIsNotToldOfAgain) {
  const RaggedSizes sizes = {.num_ranks = 2,
                             .num_slices = 2,
                             .operand_rows = 100,
                             .output_rows = 120,
                             .row_bytes = 64};
  const Problem good = MakeProblem(sizes, Kind::kDisjoint, 5);
  Problem bad = good;
  bad.At(0, 0, 0, 1) = -7;
  // CUDA may wait for all streams when something is done for the first time.
  ExpectSame(RunOnGpus(good, DType::kOther), SlowPush(good));
  Ranks ranks(sizes.num_ranks);
  const auto misfits = OnGpus(bad, ranks);
  const auto fits = OnGpus(good, ranks);
  // Two calls that do not fit have begun, of which one has run.
  std::atomic<bool> gates[2] = {};
  std::vector<cudaEvent_t> first_ran(ranks.size());
  for (const Status& status : OnRanks(ranks.devices(), [&](int r) -> Status {
         Hold(ranks.stream(r), gates[0]);
         TB_RETURN_IF_ERROR(misfits[r]->Run(ranks.Next(r)));
         EXPECT_EQ(cudaEventCreate(&first_ran[r]), cudaSuccess);
         EXPECT_EQ(cudaEventRecord(first_ran[r], ranks.stream(r)), cudaSuccess);
         Hold(ranks.stream(r), gates[1]);
         return misfits[r]->Run(ranks.Next(r));
       })) {
    EXPECT_TRUE(status.ok()) << status;
  }
  Open(gates[0]);
  for (cudaEvent_t event : first_ran) {
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  }
  const auto next = [&](int r) { return fits[r]->Run(ranks.Next(r)); };
  for (const Status& status : OnRanks(ranks.devices(), next)) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
  }
  // The other one runs, and is known already.
  Open(gates[1]);
  ASSERT_CUDA(testing::Synchronize());
  for (const Status& status : ranks.Run(next)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  const std::vector<Bytes> want = SlowPush(good);
  for (int r = 0; r < ranks.size(); ++r) EXPECT_EQ(fits[r]->Result(), want[r]);
}

TEST_F(RaggedFaultsTest, ARankThatDoesNotComeFailsTheOthers) {
  BlockingMeeting meeting(std::chrono::milliseconds(200));
  Caller caller;
  caller.op = "ragged_all_to_all over axis 'x'";
  caller.num_ranks = 2;
  caller.meeting = &meeting;
  GpuRagged call;
  call.sizes = {.num_ranks = 2, .num_slices = 2};
  const Status status = RunRaggedPush(caller, call);
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.message().find("ragged_all_to_all over axis 'x'"),
            std::string::npos)
      << status;
}

}  // namespace
}  // namespace turbobus::moe::cuda

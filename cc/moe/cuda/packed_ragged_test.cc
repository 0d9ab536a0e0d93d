#include "moe/cuda/packed_ragged.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "moe/cuda/mail.h"
#include "moe/cuda/ragged_testing.h"

// What only ragged exchanges of ranks apart have: rings, mail, and errors at
// once. Their bytes are in gpu_ragged_test.cc.

namespace turbobus::moe::cuda {
namespace {

using PackedRaggedTest = GpuRaggedTest;

TEST_F(PackedRaggedTest, MoreThanARingHoldsAndManyCallsInARow) {
  // 40 MiB and more of rows for a peer; a ring holds 12.
  const RaggedSizes large = {.num_ranks = 2,
                             .num_slices = 4,
                             .operand_rows = 9000,
                             .output_rows = 16000,
                             .row_bytes = 8200};
  const Problem problem = MakeProblem(large, Kind::kDisjoint, 3);
  ExpectSame(RunApart(problem, DType::kOther), SlowPush(problem));
  const RaggedSizes small = {.num_ranks = 4,
                             .num_slices = 8,
                             .operand_rows = 500,
                             .output_rows = 700,
                             .row_bytes = 260};
  const Problem again = MakeProblem(small, Kind::kOverlapping, 21);
  ExpectSame(RunApart(again, DType::kOther, 100), SlowPush(again));
  const int64_t pinned = MailPool::Process().total_bytes();
  ExpectSame(RunApart(again, DType::kOther, 100), SlowPush(again));
  EXPECT_LE(MailPool::Process().total_bytes(), pinned + (64 << 10));
}

TEST_F(PackedRaggedTest, ASliceThatDoesNotFitIsEveryRanksErrorAtOnce) {
  const RaggedSizes sizes = {.num_ranks = 3,
                             .num_slices = 3,
                             .num_batches = 2,
                             .num_tables = 2,
                             .operand_rows = 100,
                             .output_rows = 120,
                             .row_bytes = 48};
  Problem problem = MakeProblem(sizes, Kind::kDisjoint, 5);
  const Problem good = problem;
  problem.At(2, 1, 0, 1) = 98;
  problem.At(2, 1, 1, 1) = problem.At(1, 1, 3, 2) = 7;
  const Outcome outcome = RunApart(problem, DType::kOther);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(outcome.statuses[r].code(), StatusCode::kInvalidArgument);
    EXPECT_NE(outcome.statuses[r].message().find(
                  "slice 1 of rank 2, for rank 1: input_offsets and send_sizes "
                  "must stay within the operand's 100 rows"),
              std::string::npos)
        << outcome.statuses[r];
    EXPECT_NE(outcome.statuses[r].message().find("batch 1"), std::string::npos);
    EXPECT_EQ(outcome.results[r], problem.results[r]);
  }
  ExpectSame(RunApart(good, DType::kOther), SlowPush(good));
}

}  // namespace
}  // namespace turbobus::moe::cuda

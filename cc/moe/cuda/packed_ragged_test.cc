#include "moe/cuda/packed_ragged.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "moe/cuda/mail.h"
#include "moe/cuda/ragged_testing.h"

// Ragged exchanges of ranks that do not reach each other's memory: the bytes of
// those that do.

namespace turbobus::moe::cuda {
namespace {

using PackedRaggedTest = GpuRaggedTest;

TEST_F(PackedRaggedTest, PushEqualsWritingRowByRow) {
  unsigned seed = 300;
  for (const int num_ranks : {1, 2, 3, 5}) {
    for (const Kind kind : kKinds) {
      for (const int64_t row_bytes : {1, 6, 520, 20000}) {
        const int64_t rows = row_bytes > 1000 ? 40 : 700;
        const RaggedSizes sizes = {
            .num_ranks = num_ranks,
            .num_slices = num_ranks * (1 + static_cast<int>(seed % 3)),
            .operand_rows = rows + seed % 7,
            .output_rows = rows + 60,
            .row_bytes = row_bytes};
        SCOPED_TRACE("ranks " + std::to_string(num_ranks) + ", kind " +
                     std::to_string(static_cast<int>(kind)) + ", row " +
                     std::to_string(row_bytes));
        Problem problem = MakeProblem(sizes, kind, seed++);
        ExpectSame(RunApart(problem, DType::kOther), SlowPush(problem));
        problem.is_onto_zeros = true;
        ExpectSame(RunApart(problem, DType::kOther), SlowPush(problem));
      }
    }
  }
}

TEST_F(PackedRaggedTest, SumsHaveTheBitsOfTheCpus) {
  unsigned seed = 400;
  for (const int num_ranks : {1, 2, 3, 5}) {
    for (const Kind kind : kKinds) {
      for (const int64_t width : {5, 700}) {
        const RaggedSizes sizes = {
            .num_ranks = num_ranks,
            .num_slices = num_ranks * (1 + static_cast<int>(seed % 5)),
            .operand_rows = 61,
            .output_rows = 400,
            .row_bytes = width * 2};
        SCOPED_TRACE("ranks " + std::to_string(num_ranks) + ", kind " +
                     std::to_string(static_cast<int>(kind)));
        Problem problem =
            MakeProblem(sizes, kind, seed++, /*is_transpose=*/true);
        FillWithNumbers<uint16_t>(problem.sources, seed);
        ExpectSame(RunApart(problem, DType::kBF16),
                   RunOnCpu(problem, RaggedDirection::kTranspose,
                            RowElement::kBfloat16));
      }
    }
  }
}

TEST_F(PackedRaggedTest, BatchesHaveOneTableOrOneEach) {
  for (const int64_t num_tables : {1, 5}) {
    const RaggedSizes sizes = {.num_ranks = 2,
                               .num_slices = 6,
                               .num_batches = 5,
                               .num_tables = num_tables,
                               .operand_rows = 300,
                               .output_rows = 333,
                               .row_bytes = 84};
    Problem push = MakeProblem(sizes, Kind::kOverlapping, 7);
    ExpectSame(RunApart(push, DType::kOther), SlowPush(push));
    push.is_onto_zeros = true;
    ExpectSame(RunApart(push, DType::kOther), SlowPush(push));
    Problem sum = MakeProblem(sizes, Kind::kOverlapping, 8, true);
    FillWithNumbers<float>(sum.sources, 8);
    ExpectSame(
        RunApart(sum, DType::kF32),
        RunOnCpu(sum, RaggedDirection::kTranspose, RowElement::kFloat32));
  }
}

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

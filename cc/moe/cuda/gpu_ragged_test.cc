#include "moe/cuda/gpu_ragged.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "moe/cuda/ragged_testing.h"

// The bytes of ragged exchanges: pushed, and summed on the way back; of ranks
// that reach each other's memory, and of ranks apart, whose rows are packed.

namespace turbobus::moe::cuda {
namespace {

enum class Way { kReaching, kApart };

class RaggedWays : public GpuRaggedTest,
                   public ::testing::WithParamInterface<Way> {
 protected:
  static Outcome Run(const Problem& problem, DType dtype, int num_calls = 1) {
    return GetParam() == Way::kApart ? RunApart(problem, dtype, num_calls)
                                     : RunOnGpus(problem, dtype, num_calls);
  }

  template <typename T>
  static void CheckSums(DType dtype, RowElement element);
};

INSTANTIATE_TEST_SUITE_P(Ways, RaggedWays,
                         ::testing::Values(Way::kReaching, Way::kApart),
                         [](const auto& way) {
                           return way.param == Way::kApart ? "Apart"
                                                           : "Reaching";
                         });

TEST_P(RaggedWays, PushEqualsWritingRowByRow) {
  unsigned seed = 0;
  for (const int num_ranks : {1, 2, 3, 4}) {
    for (const Kind kind : kKinds) {
      for (const int64_t row_bytes : {1, 3, 4, 6, 16, 520, 4096, 20000}) {
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
        const std::vector<Bytes> want = SlowPush(problem);
        EXPECT_EQ(want, RunOnCpu(problem, RaggedDirection::kForward,
                                 RowElement::kFloat32));
        ExpectSame(Run(problem, DType::kOther), want);
        problem.is_onto_zeros = true;
        ExpectSame(Run(problem, DType::kOther), SlowPush(problem));
      }
    }
  }
}

TEST_P(RaggedWays, BatchesHaveOneTableOrOneEach) {
  for (const int64_t num_tables : {1, 5}) {
    for (const Kind kind : {Kind::kDisjoint, Kind::kOverlapping}) {
      const RaggedSizes sizes = {.num_ranks = 2,
                                 .num_slices = 6,
                                 .num_batches = 5,
                                 .num_tables = num_tables,
                                 .operand_rows = 300,
                                 .output_rows = 333,
                                 .row_bytes = 84};
      Problem push = MakeProblem(sizes, kind, 7);
      ExpectSame(Run(push, DType::kOther), SlowPush(push));
      push.is_onto_zeros = true;
      ExpectSame(Run(push, DType::kOther), SlowPush(push));
      Problem sum = MakeProblem(sizes, kind, 8, /*is_transpose=*/true);
      FillWithNumbers<float>(sum.sources, 8);
      ExpectSame(
          Run(sum, DType::kF32),
          RunOnCpu(sum, RaggedDirection::kTranspose, RowElement::kFloat32));
    }
  }
}

TEST_F(GpuRaggedTest, ThousandsOfSlicesAndMoreBatchesThanBlocks) {
  for (const Kind kind : {Kind::kDisjoint, Kind::kOverlapping}) {
    const RaggedSizes many = {.num_ranks = 2,
                              .num_slices = 3000,
                              .num_batches = 2,
                              .num_tables = 2,
                              .operand_rows = 9000,
                              .output_rows = 12000,
                              .row_bytes = 20};
    Problem push = MakeProblem(many, kind, 11);
    ExpectSame(RunOnGpus(push, DType::kOther), SlowPush(push));
    push.is_onto_zeros = true;
    ExpectSame(RunOnGpus(push, DType::kOther), SlowPush(push));
    Problem sum = MakeProblem(many, kind, 12, /*is_transpose=*/true);
    FillWithNumbers<float>(sum.sources, 12);
    ExpectSame(
        RunOnGpus(sum, DType::kF32),
        RunOnCpu(sum, RaggedDirection::kTranspose, RowElement::kFloat32));
  }
  const RaggedSizes batches = {.num_ranks = 2,
                               .num_slices = 2,
                               .num_batches = 40000,
                               .operand_rows = 5,
                               .output_rows = 7,
                               .row_bytes = 4};
  const Problem problem = MakeProblem(batches, Kind::kOverlapping, 13);
  ExpectSame(RunOnGpus(problem, DType::kOther), SlowPush(problem));
}

template <typename T>
void RaggedWays::CheckSums(DType dtype, RowElement element) {
  unsigned seed = 100;
  for (const int num_ranks : {1, 2, 3, 4}) {
    for (const Kind kind : kKinds) {
      for (const int64_t width : {1, 5, 64, 700}) {
        const RaggedSizes sizes = {
            .num_ranks = num_ranks,
            .num_slices = num_ranks * (1 + static_cast<int>(seed % 5)),
            .operand_rows = 61,
            .output_rows = 400,
            .row_bytes = width * static_cast<int64_t>(sizeof(T))};
        SCOPED_TRACE("ranks " + std::to_string(num_ranks) + ", kind " +
                     std::to_string(static_cast<int>(kind)) + ", width " +
                     std::to_string(width));
        Problem problem =
            MakeProblem(sizes, kind, seed++, /*is_transpose=*/true);
        FillWithNumbers<T>(problem.sources, seed);
        ExpectSame(Run(problem, dtype),
                   RunOnCpu(problem, RaggedDirection::kTranspose, element));
      }
    }
  }
}

TEST_P(RaggedWays, SumsHaveTheBitsOfTheCpusInFloat32) {
  CheckSums<float>(DType::kF32, RowElement::kFloat32);
}
TEST_P(RaggedWays, SumsHaveTheBitsOfTheCpusInFloat64) {
  CheckSums<double>(DType::kF64, RowElement::kFloat64);
}
TEST_P(RaggedWays, SumsHaveTheBitsOfTheCpusInFloat16) {
  CheckSums<uint16_t>(DType::kF16, RowElement::kFloat16);
}
TEST_P(RaggedWays, SumsHaveTheBitsOfTheCpusInBfloat16) {
  CheckSums<uint16_t>(DType::kBF16, RowElement::kBfloat16);
}

TEST_P(RaggedWays, ManyCallsInARow) {
  const RaggedSizes sizes = {.num_ranks = 4,
                             .num_slices = 8,
                             .operand_rows = 500,
                             .output_rows = 700,
                             .row_bytes = 260};
  const Problem problem = MakeProblem(sizes, Kind::kOverlapping, 21);
  ExpectSame(Run(problem, DType::kOther, 300), SlowPush(problem));
}

}  // namespace
}  // namespace turbobus::moe::cuda

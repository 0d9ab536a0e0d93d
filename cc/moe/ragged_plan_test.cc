#include "moe/ragged_plan.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace turbobus::moe {
namespace {

using Fields = std::vector<int32_t>;

TEST(RaggedTableTest, TheDocumentedExampleHasFourRuns) {
  // jax.lax.ragged_all_to_all's own example: two ranks, one slice each.
  const Fields fields = {0, 1, 1, 2, 0, 0, 1, 1,   // rank 0
                         0, 1, 1, 1, 1, 2, 2, 1};  // rank 1
  const RaggedTable table(fields, 2, 2);
  EXPECT_TRUE(table.Check(3, 4).ok());
  EXPECT_EQ(table.RunsInto(0),
            (std::vector<RaggedRun>{{0, 0, 0, 0, 1}, {1, 0, 0, 1, 1}}));
  EXPECT_EQ(table.RunsInto(1),
            (std::vector<RaggedRun>{{0, 1, 1, 0, 2, 1}, {1, 1, 1, 2, 1, 1}}));
  EXPECT_EQ(table.RunsFrom(0),
            (std::vector<RaggedRun>{{0, 0, 0, 0, 1}, {0, 1, 1, 0, 2, 1}}));
}

TEST(RaggedTableTest, ASliceThatLeavesItsArrayIsRefusedByName) {
  const Fields good = {0, 4, 0, 4};
  EXPECT_TRUE(RaggedTable(good, 1, 1).Check(4, 4).ok());
  const Status too_long = RaggedTable(good, 1, 1).Check(3, 4);
  EXPECT_EQ(too_long.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(
      too_long.message().find("the operand's 3 rows, got 4 rows from row 0"),
      std::string::npos)
      << too_long;
  EXPECT_FALSE(RaggedTable(good, 1, 1).Check(4, 3).ok());
  EXPECT_FALSE(RaggedTable(Fields{-1, 1, 0, 1}, 1, 1).Check(4, 4).ok());
  EXPECT_FALSE(RaggedTable(Fields{0, -1, 0, -1}, 1, 1).Check(4, 4).ok());
  EXPECT_FALSE(RaggedTable(Fields{0, 1, -1, 1}, 1, 1).Check(4, 4).ok());
  EXPECT_FALSE(RaggedTable(Fields{0, 1, 0, 2}, 1, 1).Check(4, 4).ok());
  const int32_t most = 2147483647;
  EXPECT_FALSE(
      RaggedTable(Fields{most, most, most, most}, 1, 1).Check(4, 4).ok());
}

TEST(RaggedTableTest, AnEmptySliceMayPointAnywherePastTheEnd) {
  EXPECT_TRUE(RaggedTable(Fields{4, 0, 9, 0}, 1, 1).Check(4, 4).ok());
  EXPECT_TRUE(RaggedTable(Fields{0, 0, 0, 0}, 1, 1).Check(0, 0).ok());
}

TEST(RaggedTableTest, WhereSlicesMeetTheLaterOneWins) {
  // Rank 0 writes rows 0..5 of itself, then its second slice rows 2..3.
  const Fields fields = {0, 6, 6, 2, 0, 2, 6, 2};
  EXPECT_EQ(RaggedTable(fields, 1, 2).RunsInto(0),
            (std::vector<RaggedRun>{
                {0, 0, 0, 0, 2, 0}, {0, 0, 6, 2, 2, 1}, {0, 0, 4, 4, 2, 0}}));
}

TEST(RaggedTableTest, RandomOverlapsEqualRowByRowWriting) {
  std::mt19937 random(20261130);
  for (int round = 0; round < 500; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 3);
    const int slices = ranks * (1 + static_cast<int>(random() % 3));
    const int operand_rows = 12;
    const int output_rows = 16;
    Fields fields(static_cast<size_t>(ranks * 4 * slices));
    const auto at = [&](int rank, int field, int slice) -> int32_t& {
      return fields[static_cast<size_t>((rank * 4 + field) * slices + slice)];
    };
    const int per_rank = slices / ranks;
    for (int r = 0; r < ranks; ++r) {
      for (int i = 0; i < slices; ++i) {
        const int size = static_cast<int>(random() % 6);
        at(r, 0, i) = static_cast<int>(random() % (operand_rows - size + 1));
        at(r, 1, i) = size;
        at(r, 2, i) = static_cast<int>(random() % (output_rows - size + 1));
        at(i / per_rank, 3, r * per_rank + i % per_rank) = size;
      }
    }
    const RaggedTable table(fields, ranks, slices);
    ASSERT_TRUE(table.Check(operand_rows, output_rows).ok());
    for (int d = 0; d < ranks; ++d) {
      std::vector<std::pair<int, int>> expected(output_rows, {-1, -1});
      for (int s = 0; s < ranks; ++s) {
        for (int i = d * per_rank; i < (d + 1) * per_rank; ++i) {
          for (int row = 0; row < at(s, 1, i); ++row) {
            expected[at(s, 2, i) + row] = {s, at(s, 0, i) + row};
          }
        }
      }
      std::vector<std::pair<int, int>> got(output_rows, {-1, -1});
      int64_t last_end = 0;
      for (const RaggedRun& run : table.RunsInto(d)) {
        EXPECT_GE(run.output_row, last_end);
        EXPECT_GT(run.num_rows, 0);
        last_end = run.output_row + run.num_rows;
        for (int row = 0; row < run.num_rows; ++row) {
          got[run.output_row + row] = {run.source,
                                       static_cast<int>(run.operand_row) + row};
        }
      }
      EXPECT_EQ(got, expected) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace turbobus::moe

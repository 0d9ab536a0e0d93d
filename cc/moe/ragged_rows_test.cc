#include "moe/ragged_rows.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

namespace turbobus::moe {
namespace {

template <typename T>
const std::byte* Bytes(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

template <typename T>
std::byte* Bytes(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

TEST(PullRowsTest, LeavesRowsAloneThatNobodyWrites) {
  const std::vector<float> zero = {1, 2, 3, 4, 5, 6};
  const std::vector<float> one = {10, 20, 30, 40, 50, 60};
  std::vector<float> result(8, -1);
  const std::vector<const std::byte*> operands = {Bytes(zero), Bytes(one)};
  const std::vector<RaggedRun> runs = {{0, 0, 1, 0, 1}, {1, 0, 0, 2, 2}};
  PullRows(runs, 8, operands, Bytes(result));
  EXPECT_EQ(result, (std::vector<float>{3, 4, -1, -1, 10, 20, 30, 40}));
}

TEST(SumRowsTest, ARowSentNowhereGetsZeroAndOneSentTwiceTheSum) {
  const std::vector<float> zero = {1, 2, 3, 4};
  const std::vector<float> one = {10, 20, 30, 40};
  std::vector<float> result(4, -1);
  const std::vector<const std::byte*> cotangents = {Bytes(zero), Bytes(one)};
  // Rows 0..1 went to rows 2..3 of rank 0, rows 1..2 to rows 0..1 of rank 1.
  SumRows(std::vector<RaggedRun>{{0, 0, 0, 2, 2}, {0, 1, 1, 0, 2}},
          RowElement::kFloat32, 4, 0, 4, cotangents, Bytes(result));
  EXPECT_EQ(result, (std::vector<float>{3, 4 + 10, 20, 0}));
}

TEST(SumRowsTest, RunsAreAddedInTheOrderOfTheirSlices) {
  const std::vector<float> cotangent = {9, 1, 1e8F, -1e8F};
  std::vector<float> result(2, -1);
  const std::vector<const std::byte*> cotangents = {Bytes(cotangent)};
  // Row 1 went to row 1 as slice 2's second row, to 2 and 3 in slices 0 and 1.
  SumRows(
      std::vector<RaggedRun>{
          {0, 0, 0, 0, 2, 2}, {0, 0, 1, 3, 1, 1}, {0, 0, 1, 2, 1, 0}},
      RowElement::kFloat32, 4, 0, 2, cotangents, Bytes(result));
  EXPECT_EQ(result, (std::vector<float>{9, 1e8F - 1e8F + 1}));
}

TEST(SumRowsTest, NestedRunsEqualRowByRowAddition) {
  std::vector<double> cotangent(64);
  for (size_t i = 0; i < cotangent.size(); ++i)
    cotangent[i] = static_cast<double>(i);
  const std::vector<RaggedRun> runs = {
      {0, 0, 0, 0, 10}, {0, 0, 3, 10, 4}, {0, 0, 3, 14, 2}, {0, 0, 6, 16, 6}};
  std::vector<double> expected(14, 0);
  for (const RaggedRun& run : runs) {
    for (int i = 0; i < run.num_rows; ++i) {
      expected[run.operand_row + i] += cotangent[run.output_row + i];
    }
  }
  std::vector<double> result(14, -1);
  const std::vector<const std::byte*> cotangents = {Bytes(cotangent)};
  SumRows(runs, RowElement::kFloat64, 8, 0, 14, cotangents, Bytes(result));
  EXPECT_EQ(result, expected);
}

/// Adds `value` and zero in half precision: a round trip through float32.
uint16_t RoundTrip(RowElement element, uint16_t value) {
  const std::vector<uint16_t> cotangent = {value, 0};
  std::vector<uint16_t> result(1, 0xabab);
  const std::vector<const std::byte*> cotangents = {Bytes(cotangent)};
  SumRows(std::vector<RaggedRun>{{0, 0, 0, 0, 1}, {0, 0, 0, 1, 1}}, element, 2,
          0, 1, cotangents, Bytes(result));
  return result[0];
}

TEST(SumRowsTest, EveryHalfPrecisionNumberSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<uint16_t>(bits);
    if (bits == 0x8000) continue;  // -0 + 0 is 0
    const bool is_nan16 = (bits & 0x7fff) > 0x7c00;
    const bool is_nan_b16 = (bits & 0x7fff) > 0x7f80;
    if (!is_nan16) {
      EXPECT_EQ(RoundTrip(RowElement::kFloat16, value), value) << bits;
    }
    if (!is_nan_b16) {
      EXPECT_EQ(RoundTrip(RowElement::kBfloat16, value), value) << bits;
    }
  }
  EXPECT_GT(RoundTrip(RowElement::kFloat16, 0x7c01) & 0x7fff, 0x7c00);
  EXPECT_GT(RoundTrip(RowElement::kBfloat16, 0x7f81) & 0x7fff, 0x7f80);
}

uint16_t Add(RowElement element, uint16_t a, uint16_t b) {
  const std::vector<uint16_t> cotangent = {a, b};
  std::vector<uint16_t> result(1);
  const std::vector<const std::byte*> cotangents = {Bytes(cotangent)};
  SumRows(std::vector<RaggedRun>{{0, 0, 0, 0, 1}, {0, 0, 0, 1, 1}}, element, 2,
          0, 1, cotangents, Bytes(result));
  return result[0];
}

TEST(SumRowsTest, HalfPrecisionRoundsToNearestEven) {
  // bfloat16: 256 + 1 lies halfway between 256 and 258; 258 + 1 between 258,
  // 260.
  EXPECT_EQ(Add(RowElement::kBfloat16, 0x4380, 0x3f80), 0x4380);
  EXPECT_EQ(Add(RowElement::kBfloat16, 0x4381, 0x3f80), 0x4382);
  // float16: 2048 + 1 lies halfway between 2048 and 2050; 2050 + 1 likewise.
  EXPECT_EQ(Add(RowElement::kFloat16, 0x6800, 0x3c00), 0x6800);
  EXPECT_EQ(Add(RowElement::kFloat16, 0x6801, 0x3c00), 0x6802);
  // float16 overflows to infinity: 65504 + 65504.
  EXPECT_EQ(Add(RowElement::kFloat16, 0x7bff, 0x7bff), 0x7c00);
}

}  // namespace
}  // namespace turbobus::moe

#include "moe/rows.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace turbobus::moe {
namespace {

uint16_t ToBF16(float x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
}
float FromBF16(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

/// Stores values, small enough to be exact, as rows of an element type.
std::vector<char> Pack(Element element, const std::vector<double>& values) {
  std::vector<char> bytes(values.size() * SizeOf(element));
  for (size_t i = 0; i < values.size(); ++i) {
    char* out = bytes.data() + i * SizeOf(element);
    const auto f = static_cast<float>(values[i]);
    const uint16_t b = ToBF16(f);
    const auto h = static_cast<_Float16>(f);
    switch (element) {
      case Element::kF32:
        std::memcpy(out, &f, 4);
        break;
      case Element::kF64:
        std::memcpy(out, &values[i], 8);
        break;
      case Element::kBF16:
        std::memcpy(out, &b, 2);
        break;
      case Element::kF16:
        std::memcpy(out, &h, 2);
        break;
    }
  }
  return bytes;
}

std::vector<double> RandomIntegers(int64_t size, std::mt19937& random) {
  std::vector<double> values(size);
  for (double& v : values) v = static_cast<int>(random() % 7) - 3;
  return values;
}

/// The weights as the kernels of an element take them.
std::vector<char> PackWeights(Element element, const std::vector<double>& w) {
  return Pack(element == Element::kF64 ? Element::kF64 : Element::kF32, w);
}

class RowsTest : public ::testing::TestWithParam<Element> {};

TEST_P(RowsTest, WeightedSumIsExactOnIntegers) {
  const Element element = GetParam();
  std::mt19937 random(1);
  for (int64_t size : {0, 1, 15, 16, 17, 1023, 1024, 1025, 3000}) {
    for (int num_rows : {0, 1, 2, 5}) {
      std::vector<std::vector<char>> rows;
      std::vector<const void*> pointers;
      std::vector<double> sums(size);
      std::vector<double> plain(size);
      const std::vector<double> weights = RandomIntegers(num_rows, random);
      for (int i = 0; i < num_rows; ++i) {
        const std::vector<double> values = RandomIntegers(size, random);
        rows.push_back(Pack(element, values));
        pointers.push_back(rows.back().data());
        for (int64_t h = 0; h < size; ++h) {
          sums[h] += weights[i] * values[h];
          plain[h] += values[h];
        }
      }
      std::vector<char> out(size * SizeOf(element), 0x55);
      WeightedSum(element)(pointers.data(),
                           PackWeights(element, weights).data(), num_rows, size,
                           out.data());
      EXPECT_EQ(out, Pack(element, sums)) << size << " " << num_rows;
      WeightedSum(element)(pointers.data(), nullptr, num_rows, size,
                           out.data());
      EXPECT_EQ(out, Pack(element, plain)) << size << " " << num_rows;
    }
  }
}

TEST_P(RowsTest, ScaleAndDotIsExactOnIntegers) {
  const Element element = GetParam();
  std::mt19937 random(2);
  for (int64_t size : {0, 1, 15, 16, 17, 1000}) {
    const std::vector<double> in = RandomIntegers(size, random);
    const std::vector<double> row = RandomIntegers(size, random);
    std::vector<double> scaled(size);
    double dot = 0;
    for (int64_t h = 0; h < size; ++h) {
      dot += in[h] * row[h];
      scaled[h] = 3 * in[h];
    }
    std::vector<char> out(size * SizeOf(element), 0x55);
    EXPECT_EQ(
        ScaleAndDot(element)(Pack(element, in).data(),
                             Pack(element, row).data(), 3, size, out.data()),
        dot);
    EXPECT_EQ(out, Pack(element, scaled)) << size;
  }
}

INSTANTIATE_TEST_SUITE_P(Elements, RowsTest,
                         ::testing::Values(Element::kF32, Element::kF64,
                                           Element::kBF16, Element::kF16));

TEST(RowsRoundingTest, BF16RoundsToNearestEvenOnce) {
  const auto round = [](float x) {
    const uint16_t one = ToBF16(1.0f);
    const void* rows[] = {&one};
    const float weights[] = {x};
    uint16_t out = 0;
    WeightedSum(Element::kBF16)(rows, weights, 1, 1, &out);
    return FromBF16(out);
  };
  EXPECT_EQ(round(1.0f + 0x1p-8f), 1.0f);                // A tie, to even.
  EXPECT_EQ(round(1.0f + 3 * 0x1p-8f), 1.0f + 0x1p-6f);  // A tie, to even.
  EXPECT_EQ(round(1.0f + 0x1p-8f + 0x1p-20f), 1.0f + 0x1p-7f);
  EXPECT_EQ(round(std::numeric_limits<float>::max()),
            std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(round(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(round(-std::numeric_limits<float>::infinity()),
            -std::numeric_limits<float>::infinity());
  // A NaN whose payload would round up into another number stays one.
  EXPECT_TRUE(std::isnan(round(std::bit_cast<float>(0x7fffffffu))));
}

TEST(RowsRoundingTest, SumsOfBF16AreRoundedOnceAtTheEnd) {
  // 256 ones, then 1: in bfloat16 256 + 1 would be lost at each step.
  const uint16_t big = ToBF16(256.0f);
  const uint16_t one = ToBF16(1.0f);
  std::vector<const void*> rows = {&big};
  for (int i = 0; i < 8; ++i) rows.push_back(&one);
  uint16_t out = 0;
  WeightedSum(Element::kBF16)(rows.data(), nullptr, 9, 1, &out);
  EXPECT_EQ(FromBF16(out), 264.0f);
}

}  // namespace
}  // namespace turbobus::moe

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "moe/cuda/packed_cases.h"

// Rows that together have more than 2^31 bytes: there and back between two
// ranks of one card, which has to have 20 GB to spare.

namespace turbobus::moe::cuda::testing {
namespace {

constexpr int64_t kRowBytes = 7168;
constexpr int kNumTokens = 300'000;
static_assert(kNumTokens * kRowBytes > int64_t{1} << 31);
constexpr int kNumValues = kRowBytes / sizeof(float);
/// Rows repeat after so many: no power of two, so that none that an overflow
/// takes for another has the same bytes.
constexpr int kPeriod = 1021;

const Case kCase = {.name = "LargeRows",
                    .num_tokens = kNumTokens,
                    .top_k = 1,
                    .num_experts = 2,
                    .hidden = kNumValues,
                    .num_rows = kNumTokens};

using Row = std::vector<float>;

/// Small integers: a row times itself is exact in float32.
Row TokenOf(int64_t token) {
  const int row = static_cast<int>(token % kPeriod);
  Row values = {static_cast<float>(row % 61), static_cast<float>(row / 61)};
  while (values.size() < kNumValues) {
    values.push_back(static_cast<float>((3 * row + values.size()) % 61));
  }
  return values;
}

Row Twice(Row row) {
  for (float& value : row) value *= 2;
  return row;
}

/// The bytes of all tokens, on the current GPU.
DeviceBytes AllTokens() {
  DeviceBytes tokens = DeviceBytes::Scratch(kNumTokens * kRowBytes);
  for (int64_t token = 0; token < kPeriod; ++token) {
    (void)cudaMemcpy(tokens.as() + token * kRowBytes, TokenOf(token).data(),
                     kRowBytes, cudaMemcpyDefault);
  }
  for (int64_t done = kPeriod; done < kNumTokens; done *= 2) {
    const int64_t num = std::min(done, kNumTokens - done);
    (void)cudaMemcpy(tokens.as() + done * kRowBytes, tokens.as(),
                     num * kRowBytes, cudaMemcpyDefault);
  }
  (void)cudaDeviceSynchronize();
  return tokens;
}

Row ReadRow(const DeviceBytes& rows, int64_t row) {
  Row values(kNumValues);
  (void)cudaMemcpy(values.data(), rows.as() + row * kRowBytes, kRowBytes,
                   cudaMemcpyDefault);
  return values;
}

/// Rows at both ends, around 2^31 bytes, and some in between.
std::vector<int64_t> RowsToLookAt() {
  constexpr int64_t kBeyond = (int64_t{1} << 31) / kRowBytes;
  std::vector<int64_t> rows = {1,           kBeyond - 1,    kBeyond,
                               kBeyond + 1, kNumTokens - 2, kNumTokens - 1};
  for (int64_t row = 0; row < kNumTokens; row += 9973) rows.push_back(row);
  return rows;
}

class LargeRowsTest : public GpuTest,
                      public ::testing::WithParamInterface<How> {};

// https://github.com/NVIDIA/TransformerEngine/issues/2908 (a): an int32 product
// of row and row size overflows. The CPU's part of it is in moe/exchange_test.
TEST_P(LargeRowsTest, OffsetsBeyondTwoToThe31Hold) {
  Wiring wiring = WiringOf(2, GetParam());
  wiring.devices = {0, 0};
  Ranks ranks(wiring, std::chrono::seconds(20));
  // Every token goes to the other rank.
  int64_t scratch_bytes = 0;
  for (const int64_t bytes :
       {ScratchBytes(ranks.CallerOf(0, 0), DispatchOf(kCase, 0, {})),
        ScratchBytes(ranks.CallerOf(0, 0), CombineOf(kCase, 0, {}, true)),
        ScratchBytes(ranks.CallerOf(0, 0), CombineGradOf(kCase, 0, {}))}) {
    scratch_bytes = std::max(scratch_bytes, bytes);
  }
  const int64_t array_bytes = kNumTokens * kRowBytes;
  const int64_t needed = 5 * array_bytes + 2 * scratch_bytes + (1 << 28);
  size_t free_bytes = 0;
  size_t all_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &all_bytes), cudaSuccess);
  if (static_cast<int64_t>(free_bytes) < needed) {
    GTEST_SKIP() << "the GPU has " << free_bytes << " bytes free, " << needed
                 << " are needed";
  }

  const DeviceBytes tokens = AllTokens();  // Of both ranks: they only read it.
  std::vector<RankMemory> memory(2);
  for (int r = 0; r < 2; ++r) {
    RankMemory& own = memory[r];
    own.ids = DeviceBytes(ToBytes(std::vector<int32_t>(kNumTokens, 1 - r)));
    own.weights = DeviceBytes(ToBytes(std::vector<float>(kNumTokens, 2)));
    own.rows = DeviceBytes(array_bytes, 0xff);
    own.sums = DeviceBytes(array_bytes, 0xff);
    own.group_sizes = DeviceBytes(sizeof(int32_t), 0xff);
    own.wanted = DeviceBytes(sizeof(int32_t), 0xff);
    own.slots = DeviceBytes(kNumTokens * sizeof(int32_t), 0xff);
    own.weight_grads = DeviceBytes(kNumTokens * sizeof(float), 0xff);
    own.scratch.push_back(DeviceBytes::Scratch(scratch_bytes));
  }
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  const auto run = [&](auto make, auto exchange) {
    for (const Status& status : ranks.Call([&](const Caller& caller) {
           auto call = make(caller.rank, memory[caller.rank]);
           call.scratch = memory[caller.rank].scratch.front().as();
           return exchange(caller, call);
         })) {
      ASSERT_TRUE(status.ok()) << status;
    }
  };

  run(
      [&](int rank, const RankMemory& own) {
        GpuDispatch call = DispatchOf(kCase, rank, own);
        call.tokens = tokens.as();
        return call;
      },
      &RunDispatch);
  for (const RankMemory& own : memory) {
    EXPECT_EQ(own.group_sizes.Read<int32_t>().at(0), kNumTokens);
    EXPECT_EQ(own.wanted.Read<int32_t>().at(0), kNumTokens);
    for (const int64_t row : RowsToLookAt()) {
      EXPECT_TRUE(ReadRow(own.rows, row) == TokenOf(row)) << row;
    }
  }

  run(
      [&](int rank, const RankMemory& own) {
        return CombineOf(kCase, rank, own, /*has_weights=*/true);
      },
      &RunCombine);
  for (const RankMemory& own : memory) {
    for (const int64_t row : RowsToLookAt()) {
      EXPECT_TRUE(ReadRow(own.sums, row) == Twice(TokenOf(row))) << row;
    }
  }

  for (RankMemory& own : memory) {
    own.sums = DeviceBytes();  // First, so that the memory can serve twice.
    own.row_grads = DeviceBytes(array_bytes, 0xff);
  }
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  run(
      [&](int rank, const RankMemory& own) {
        GpuCombineGrad call = CombineGradOf(kCase, rank, own);
        call.sum_grads = tokens.as();
        return call;
      },
      &RunCombineGrad);
  for (const RankMemory& own : memory) {
    const std::vector<float> weight_grads = own.weight_grads.Read<float>();
    for (const int64_t row : RowsToLookAt()) {
      const Row token = TokenOf(row);
      EXPECT_TRUE(ReadRow(own.row_grads, row) == Twice(token)) << row;
      EXPECT_EQ(
          weight_grads.at(row),
          std::inner_product(token.begin(), token.end(), token.begin(), 0.f))
          << row;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, LargeRowsTest,
                         ::testing::Values(How::kDirect, How::kRing),
                         [](const auto& way) { return HowName(way.param); });

}  // namespace
}  // namespace turbobus::moe::cuda::testing

#include "moe/exchange.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "moe/exchange_testing.h"

namespace turbobus::moe {
namespace {

using testing::Layer;
using testing::Pointers;
using testing::RandomShape;
using testing::RunAll;

TEST(ExchangeTest, PlanningAndMovingApartIsTheSameDispatch) {
  std::mt19937 random(8);
  for (int round = 0; round < 60; ++round) {
    Layer layer(RandomShape(random), 1 + random() % 40, 1 + random() % 3,
                random);
    Layer in_two = layer;
    layer.Dispatch();
    in_two.DispatchInTwo();
    EXPECT_EQ(in_two.rows, layer.rows);
    EXPECT_EQ(in_two.slots, layer.slots);
    EXPECT_EQ(in_two.group_sizes, layer.group_sizes);
    EXPECT_EQ(in_two.wanted, layer.wanted);
  }
}

TEST(ExchangeTest, DispatchThenCombineIsTheWeightedIdentityOfWhatIsKept) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    Layer layer(RandomShape(random), 1 + random() % 40, 1 + random() % 3,
                random);
    const ExchangeShape& shape = layer.config.shape;
    layer.Dispatch();
    for (const auto& rows : layer.rows) {
      for (float x : rows) ASSERT_FALSE(std::isnan(x));  // Padding is zero.
    }
    layer.Combine(/*is_weighted=*/true);
    for (int r = 0; r < shape.num_ranks; ++r) {
      for (size_t t = 0; t < layer.sums[r].size() / layer.hidden; ++t) {
        float weight = 0;
        for (int j = 0; j < shape.top_k; ++j) {
          const size_t c = t * shape.top_k + j;
          if (layer.slots[r][c] != kNoRow) weight += layer.weights[r][c];
        }
        for (int64_t h = 0; h < layer.hidden; ++h) {
          ASSERT_EQ(layer.sums[r][t * layer.hidden + h],
                    weight * layer.tokens[r][t * layer.hidden + h]);
        }
      }
    }
  }
}

TEST(ExchangeTest, WithoutWeightsCombineIsTheTransposeOfDispatch) {
  std::mt19937 random(8);
  for (int round = 0; round < 40; ++round) {
    Layer layer(RandomShape(random), 1 + random() % 40, 1 + random() % 2,
                random);
    layer.Dispatch();
    // <dispatch(tokens), g> == <tokens, combine(g)> for any g.
    auto dispatched = layer.rows;
    double left = 0;
    for (size_t r = 0; r < layer.rows.size(); ++r) {
      for (size_t i = 0; i < layer.rows[r].size(); ++i) {
        const float g = static_cast<int>(random() % 7) - 3;
        left += dispatched[r][i] * g;
        layer.rows[r][i] = g;
      }
    }
    layer.Combine(/*is_weighted=*/false);
    double right = 0;
    for (size_t r = 0; r < layer.sums.size(); ++r) {
      for (size_t i = 0; i < layer.sums[r].size(); ++i) {
        right += layer.sums[r][i] * layer.tokens[r][i];
      }
    }
    ASSERT_EQ(left, right);
  }
}

TEST(ExchangeTest, GradientsOfCombineAreItsTranspose) {
  std::mt19937 random(9);
  for (int round = 0; round < 40; ++round) {
    Layer layer(RandomShape(random), 1 + random() % 40, 1 + random() % 2,
                random);
    const ExchangeShape& shape = layer.config.shape;
    layer.Dispatch();
    layer.Combine(/*is_weighted=*/true);
    auto sum_grads = layer.tokens;
    for (auto& of_rank : sum_grads) {
      for (float& x : of_rank) x = static_cast<int>(random() % 7) - 3;
    }
    const auto [row_grads, weight_grads] = layer.CombineGrad(sum_grads);
    // Combine is linear in rows and in weights: <sums, g> is both products.
    double sums = 0;
    double rows = 0;
    double weights = 0;
    for (int r = 0; r < shape.num_ranks; ++r) {
      for (size_t i = 0; i < sum_grads[r].size(); ++i) {
        sums += layer.sums[r][i] * sum_grads[r][i];
      }
      for (size_t i = 0; i < row_grads[r].size(); ++i) {
        ASSERT_FALSE(std::isnan(row_grads[r][i]));
        rows += layer.rows[r][i] * row_grads[r][i];
      }
      for (size_t i = 0; i < weight_grads[r].size(); ++i) {
        weights += layer.weights[r][i] * weight_grads[r][i];
      }
    }
    ASSERT_EQ(sums, rows);
    ASSERT_EQ(sums, weights);
  }
}

TEST(ExchangeTest, RanksWithOtherSizesAreRefused) {
  std::vector<CombineCall> calls(3);
  calls[2].config.shape.num_tokens = 5;
  EXPECT_EQ(MakeCombine(Pointers(calls)).status(),
            InvalidArgument("rank 2 calls with other sizes than rank 0"));
}

/// Address space that costs memory only where it is touched.
class Sparse {
 public:
  explicit Sparse(size_t size) : size_(size) {
    data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (data_ != MAP_FAILED) munmap(data_, size_);
  }
  char* data() const {
    return data_ == MAP_FAILED ? nullptr : static_cast<char*>(data_);
  }

 private:
  size_t size_;
  void* data_;
};

// https://github.com/NVIDIA/TransformerEngine/issues/2908 (a): an int32 product
// of row and row size overflows where arrays have 2^31 elements or more.
TEST(ExchangeTest, OffsetsBeyondTwoToThe31Hold) {
  constexpr int64_t kRowBytes = 7168;
  constexpr int64_t kNumTokens = 700'000;  // 5 GB of int8.
  const Sparse tokens(kNumTokens * kRowBytes);
  if (tokens.data() == nullptr) GTEST_SKIP() << "no 5 GB of address space";
  std::vector<int32_t> ids(kNumTokens, -1);
  std::vector<int32_t> slots(kNumTokens);
  ids.back() = 0;
  char* const last = tokens.data() + (kNumTokens - 1) * kRowBytes;
  std::memset(last, 42, kRowBytes);
  std::vector<char> rows(kRowBytes);
  int32_t group_size = 0;
  int32_t wanted = 0;
  DispatchCall dispatch;
  dispatch.config.shape = {.num_experts = 1,
                           .num_tokens = kNumTokens,
                           .top_k = 1,
                           .recv_capacity = 1};
  dispatch.config.row_bytes = kRowBytes;
  dispatch.tokens = tokens.data();
  dispatch.expert_ids = ids.data();
  dispatch.rows = rows.data();
  dispatch.group_sizes = &group_size;
  dispatch.wanted = &wanted;
  dispatch.slots = slots.data();
  CountDispatch(dispatch);
  const DispatchCall* const calls[] = {&dispatch};
  RunAll(MakeDispatch(calls));
  EXPECT_EQ(group_size, 1);
  EXPECT_EQ(rows, std::vector<char>(kRowBytes, 42));

  // And back out of the last of as many rows.
  CombineCall combine;
  combine.config.shape = {.num_experts = 1,
                          .num_tokens = 1,
                          .top_k = 1,
                          .recv_capacity = kNumTokens};
  combine.config.row_bytes = kRowBytes;
  auto* const last_row = reinterpret_cast<float*>(last);
  std::fill(last_row, last_row + kRowBytes / 4, 1.5f);
  const int32_t id = 0;
  const int32_t slot = kNumTokens - 1;
  const float weight = 2;
  std::vector<float> sum(kRowBytes / 4);
  combine.rows = tokens.data();
  combine.expert_ids = &id;
  combine.slots = &slot;
  combine.weights = &weight;
  combine.sums = sum.data();
  const CombineCall* const combines[] = {&combine};
  RunAll(MakeCombine(combines));
  EXPECT_EQ(sum, std::vector<float>(kRowBytes / 4, 3.0f));
}

TEST(ExchangeTest, SlotsThatPointNowhereCountAsNoRow) {
  std::mt19937 random(10);
  Layer layer({.num_ranks = 1,
               .num_experts = 1,
               .num_tokens = 3,
               .top_k = 1,
               .recv_capacity = 3},
              16, 1, random);
  layer.ids[0] = {0, 0, 0};
  layer.Dispatch();
  layer.slots[0] = {3, -7, std::numeric_limits<int32_t>::max()};
  layer.Combine(/*is_weighted=*/true);
  EXPECT_EQ(layer.sums[0], std::vector<float>(3 * 16, 0.0f));
}

TEST(ExchangeTest, GradientsOfRowsThatNoSlotNamesAreZero) {
  std::mt19937 random(12);
  for (int round = 0; round < 40; ++round) {
    Layer layer(RandomShape(random), 1 + random() % 40, 1 + random() % 2,
                random);
    layer.Dispatch();
    for (size_t r = 0; r < layer.ids.size(); ++r) {
      switch (round % 3) {
        case 0:  // Choices masked after their rows were sent.
          for (int32_t& id : layer.ids[r]) id = random() % 2 ? id : -1;
          break;
        case 1:
          for (int32_t& slot : layer.slots[r]) {
            slot = random() % 2 ? slot : kNoRow;
          }
          break;
        case 2:
          for (int32_t& size : layer.group_sizes[r]) size += random() % 5;
      }
    }
    auto sum_grads = layer.tokens;
    for (auto& of_rank : sum_grads) {
      std::fill(of_rank.begin(), of_rank.end(), 1.0f);
    }
    for (auto& of_rank : layer.rows) {
      std::fill(of_rank.begin(), of_rank.end(), 1.0f);
    }
    const auto [row_grads, weight_grads] = layer.CombineGrad(sum_grads);
    for (const auto* grads : {&row_grads, &weight_grads}) {
      for (const auto& of_rank : *grads) {
        for (float x : of_rank) ASSERT_FALSE(std::isnan(x));
      }
    }
  }
}

}  // namespace
}  // namespace turbobus::moe

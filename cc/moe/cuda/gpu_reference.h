#ifndef TURBOBUS_MOE_CUDA_GPU_REFERENCE_H_
#define TURBOBUS_MOE_CUDA_GPU_REFERENCE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "moe/cuda/kernels.h"
#include "moe/exchange.h"

// Layers for tests of exchanges on GPUs: what each rank gives, and what the
// exchange on CPU devices makes of it. Values are small integers, whose sums
// are exact in every order: results are the same bit for bit.

namespace turbobus::moe::cuda {

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;

enum class Kind { kDistinct, kRepeated, kMasked, kOne, kFirstRank, kNone };

struct Case {
  std::string name = {};
  int num_ranks = 2;
  Kind kind = Kind::kDistinct;
  DType dtype = DType::kF32;
  int num_tokens = 100;
  int top_k = 3;
  int num_experts = 8;
  int64_t hidden = 36;
  int64_t recv_capacity = 0;  // 0: nothing is dropped.
  int expert_capacity = 0;
};

inline int64_t SizeOf(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kF64 ? 8 : 2;
}

inline Element ToElement(DType dtype) {
  return dtype == DType::kF32   ? Element::kF32
         : dtype == DType::kF64 ? Element::kF64
         : dtype == DType::kF16 ? Element::kF16
                                : Element::kBF16;
}

/// `count` random integers in [-most, most], as elements of a dtype.
inline Bytes Integers(DType dtype, int64_t count, int most,
                      std::mt19937& random) {
  Bytes bytes(count * SizeOf(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const int value = static_cast<int>(random() % (2 * most + 1)) - most;
    const auto put = [&](auto x) {
      std::memcpy(bytes.data() + i * sizeof(x), &x, sizeof(x));
    };
    switch (dtype) {
      case DType::kF64:
        put(static_cast<double>(value));
        break;
      case DType::kF16:
        put(__half(static_cast<float>(value)));
        break;
      case DType::kBF16:
        put(__nv_bfloat16(static_cast<float>(value)));
        break;
      default:
        put(static_cast<float>(value));
    }
  }
  return bytes;
}

inline Ints Routing(const Case& c, int rank, std::mt19937& random) {
  Ints ids;
  Ints experts(c.num_experts);
  std::iota(experts.begin(), experts.end(), 0);
  for (int t = 0; t < c.num_tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (int k = 0; k < c.top_k; ++k) {
      const int any = static_cast<int>(random());
      switch (c.kind) {
        case Kind::kDistinct:
          ids.push_back(experts[k % c.num_experts]);
          break;
        case Kind::kRepeated:
          ids.push_back((any & 0xFFFF) % std::max(2, c.num_experts / 3));
          break;
        case Kind::kMasked:
          ids.push_back((any & 0xFFFF) % (c.num_experts + 4) - 2);
          break;
        case Kind::kOne:
          ids.push_back(0);
          break;
        case Kind::kFirstRank:
          ids.push_back(k % (c.num_experts / c.num_ranks));
          break;
        case Kind::kNone:
          ids.push_back(rank % 2 == 0 ? -1 : INT32_MAX);
          break;
      }
    }
  }
  return ids;
}

/// What one rank gives, and what it gets.
struct Rank {
  Bytes tokens, weights, outputs, sum_grads;
  Ints ids;

  Bytes rows, sums, token_grads, row_grads, weight_grads;
  Ints group_sizes, wanted, slots;
};

inline ExchangeConfig ToConfig(const Case& c) {
  ExchangeConfig config;
  ExchangeShape& shape = config.shape;
  shape.num_ranks = c.num_ranks;
  shape.num_experts = c.num_experts;
  shape.num_tokens = c.num_tokens;
  shape.top_k = c.top_k;
  shape.expert_capacity = c.expert_capacity;
  shape.recv_capacity =
      c.expert_capacity > 0 ? c.expert_capacity * shape.num_local_experts()
      : c.recv_capacity > 0
          ? c.recv_capacity
          : static_cast<int64_t>(c.num_ranks) * c.num_tokens * c.top_k;
  config.row_bytes = c.hidden * SizeOf(c.dtype);
  return config;
}

inline Shape ToShape(const ExchangeConfig& config, int rank) {
  const ExchangeShape& from = config.shape;
  return {.rank = rank,
          .num_ranks = from.num_ranks,
          .num_tokens = static_cast<int>(from.num_tokens),
          .top_k = from.top_k,
          .num_experts = from.num_experts,
          .num_local_experts = from.num_local_experts(),
          .row_bytes = config.row_bytes,
          .num_rows = from.recv_capacity,
          .expert_capacity = static_cast<int>(from.expert_capacity)};
}

/// NaN in the experts' results where they had no row, which nobody may read.
inline void SpoilPadding(const ExchangeConfig& config, Rank& rank) {
  const ExchangeShape& shape = config.shape;
  const auto spoil = [&](int64_t first, int64_t end) {
    std::fill(rank.outputs.begin() + first * config.row_bytes,
              rank.outputs.begin() + end * config.row_bytes, uint8_t{0xFF});
  };
  if (!shape.is_padded()) {
    spoil(std::accumulate(rank.group_sizes.begin(), rank.group_sizes.end(), 0),
          shape.recv_capacity);
    return;
  }
  for (int e = 0; e < shape.num_local_experts(); ++e) {
    spoil(e * shape.expert_capacity + rank.group_sizes[e],
          (e + 1) * shape.expert_capacity);
  }
}

template <typename Make, typename Call>
void RunOnCpu(Make make, const std::vector<Call>& calls) {
  std::vector<const Call*> pointers;
  for (const Call& call : calls) pointers.push_back(&call);
  StatusOr<std::unique_ptr<Work>> work = make(pointers);
  ASSERT_TRUE(work.ok()) << work.status();
  for (int64_t i = 0; i < (*work)->num_pieces(); ++i) (*work)->Run(i);
  (*work)->Finish();
}

/// The inputs of a layer and, from the exchange on CPU devices, its results.
inline std::vector<Rank> Reference(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  const ExchangeConfig config = ToConfig(c);
  const int64_t num_rows = config.shape.recv_capacity;
  const DType weight_dtype = c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  std::vector<Rank> ranks(c.num_ranks);
  std::vector<DispatchCall> dispatch(c.num_ranks);
  std::vector<CombineCall> combine(c.num_ranks), transpose(c.num_ranks);
  std::vector<CombineGradCall> grad(c.num_ranks);
  for (int r = 0; r < c.num_ranks; ++r) {
    Rank& rank = ranks[r];
    const int64_t num_slots = static_cast<int64_t>(c.num_tokens) * c.top_k;
    rank.ids = Routing(c, r, random);
    rank.tokens = Integers(c.dtype, c.num_tokens * c.hidden, 3, random);
    rank.sum_grads = Integers(c.dtype, c.num_tokens * c.hidden, 3, random);
    rank.weights = Integers(weight_dtype, num_slots, 2, random);
    rank.outputs = Integers(c.dtype, num_rows * c.hidden, 3, random);
    rank.rows.resize(rank.outputs.size());
    rank.row_grads.resize(rank.outputs.size());
    rank.sums.resize(rank.tokens.size());
    rank.token_grads.resize(rank.tokens.size());
    rank.weight_grads.resize(rank.weights.size());
    rank.group_sizes.resize(config.shape.num_local_experts());
    rank.wanted.resize(rank.group_sizes.size());
    rank.slots.resize(num_slots);

    const Element element = ToElement(c.dtype);
    dispatch[r] = {.config = config,
                   .tokens = rank.tokens.data(),
                   .expert_ids = rank.ids.data(),
                   .rows = rank.rows.data(),
                   .group_sizes = rank.group_sizes.data(),
                   .wanted = rank.wanted.data(),
                   .slots = rank.slots.data(),
                   .counts = nullptr};
    CountDispatch(dispatch[r]);
    combine[r] = {.config = config,
                  .element = element,
                  .rows = rank.outputs.data(),
                  .expert_ids = rank.ids.data(),
                  .slots = rank.slots.data(),
                  .weights = rank.weights.data(),
                  .sums = rank.sums.data()};
    transpose[r] = combine[r];
    transpose[r].weights = nullptr;
    transpose[r].sums = rank.token_grads.data();
    grad[r] = {.config = config,
               .element = element,
               .sum_grads = rank.sum_grads.data(),
               .rows = rank.outputs.data(),
               .expert_ids = rank.ids.data(),
               .slots = rank.slots.data(),
               .weights = rank.weights.data(),
               .group_sizes = rank.group_sizes.data(),
               .row_grads = rank.row_grads.data(),
               .weight_grads = rank.weight_grads.data()};
  }
  RunOnCpu(MakeDispatch, dispatch);
  for (Rank& rank : ranks) SpoilPadding(config, rank);
  RunOnCpu(MakeCombine, combine);
  RunOnCpu(MakeCombine, transpose);
  RunOnCpu(MakeCombineGrad, grad);
  return ranks;
}

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_GPU_REFERENCE_H_

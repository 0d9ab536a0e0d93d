#ifndef TURBOBUS_MOE_CUDA_PACKED_CASES_H_
#define TURBOBUS_MOE_CUDA_PACKED_CASES_H_

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/gpu_exchange.h"

// Exchanges of every kind for tests of packed ones, and the memory of their
// ranks.

namespace turbobus::moe::cuda::testing {

enum class How { kDirect, kMail, kRing, kBroadcast };

inline Wiring WiringOf(int num_ranks, How how) {
  Wiring wiring;
  wiring.is_direct = how == How::kDirect;
  for (int r = 0; r < num_ranks; ++r) {
    // One GPU always reaches its own memory.
    wiring.devices.push_back(wiring.is_direct ? 0 : DeviceOf(r));
  }
  wiring.is_broadcast = how == How::kBroadcast;
  wiring.most_mailed_bytes = how == How::kMail ? int64_t{1} << 40 : -1;
  return wiring;
}

struct Case {
  std::string name;
  int num_ranks = 2;
  int num_tokens = 40;
  int top_k = 2;
  int num_experts = 8;
  int hidden = 64;
  DType dtype = DType::kF32;
  std::string routing = "random";
  int64_t num_rows = 0;  // 0: nothing is dropped.
  int expert_capacity = 0;

  int element_bytes() const {
    switch (dtype) {
      case DType::kF64:
        return 8;
      case DType::kF32:
        return 4;
      case DType::kF16:
      case DType::kBF16:
        return 2;
      case DType::kOther:
        return 1;
    }
    return 1;
  }

  Shape ShapeOf(int rank) const {
    Shape shape;
    shape.rank = rank;
    shape.num_ranks = num_ranks;
    shape.num_tokens = num_tokens;
    shape.top_k = top_k;
    shape.num_experts = num_experts;
    shape.num_local_experts = num_experts / num_ranks;
    shape.row_bytes = int64_t{hidden} * element_bytes();
    shape.expert_capacity = expert_capacity;
    shape.num_rows = num_rows;
    if (expert_capacity > 0) {
      shape.num_rows = int64_t{shape.num_local_experts} * expert_capacity;
    } else if (num_rows == 0) {
      shape.num_rows = int64_t{num_ranks} * num_tokens *
                       std::min(top_k, shape.num_local_experts);
    }
    return shape;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Case& one) {
  return out << one.name;
}

inline std::vector<int32_t> IdsOf(const Case& one, int rank) {
  std::mt19937 random(17 + rank);
  std::vector<int32_t> ids;
  for (int t = 0; t < one.num_tokens; ++t) {
    for (int j = 0; j < one.top_k; ++j) {
      int32_t id = static_cast<int32_t>(random() % one.num_experts);
      if (one.routing == "one") id = one.num_experts - 1;
      if (one.routing == "skewed" && random() % 4 != 0) id = j % 2;
      if (one.routing == "masked" && random() % 3 == 0) {
        id = random() % 2 == 0 ? -1 : one.num_experts + 7;
      }
      if (one.routing == "nobody") id = -1;
      // Nobody chooses the first rank, and the last rank chooses nobody.
      if (one.routing == "empty") {
        const int local = one.num_experts / one.num_ranks;
        id = local + id % (one.num_experts - local);
        if (rank == one.num_ranks - 1) id = -1;
      }
      ids.push_back(id);
    }
  }
  return ids;
}

/// Elements of small integers: sums are exact in any order.
inline Bytes Elements(DType dtype, int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes;
  for (int64_t i = 0; i < count; ++i) {
    const int value = static_cast<int>(random() % 17) - 8;
    const auto append = [&](auto element) {
      const auto* data = reinterpret_cast<const uint8_t*>(&element);
      bytes.insert(bytes.end(), data, data + sizeof(element));
    };
    switch (dtype) {
      case DType::kF64:
        append(static_cast<double>(value) / 3);
        break;
      case DType::kF32:
        append(static_cast<float>(value) / 3);
        break;
      case DType::kF16: {
        // 1.5 to 2 by the bits; both signs.
        append(static_cast<uint16_t>(0x3e00 + value * 16 +
                                     (value < 0 ? 0x8000 : 0)));
        break;
      }
      case DType::kBF16:
        append(
            static_cast<uint16_t>(0x3fc0 + value + (value < 0 ? 0x8000 : 0)));
        break;
      case DType::kOther:
        append(static_cast<uint8_t>(value));
        break;
    }
  }
  return bytes;
}

/// The operands and results of one rank.
struct RankMemory {
  DeviceBytes tokens, ids, weights;
  DeviceBytes rows, group_sizes, wanted, slots;
  DeviceBytes sums, collected, row_grads, weight_grads;
  std::vector<DeviceBytes> scratch;
};

inline std::string HowName(How how) {
  switch (how) {
    case How::kDirect:
      return "Direct";
    case How::kMail:
      return "Mail";
    case How::kRing:
      return "Ring";
    case How::kBroadcast:
      return "Broadcast";
  }
  return "";
}

inline const Case kCases[] = {
    {.name = "Random"},
    {.name = "OneChoice", .top_k = 1},
    {.name = "ThreeRanks", .num_ranks = 3, .top_k = 4, .num_experts = 9},
    {.name = "FourRanksManyChoices",
     .num_ranks = 4,
     .num_tokens = 77,
     .top_k = 8,
     .num_experts = 32},
    {.name = "OneToken", .num_tokens = 1},
    {.name = "NoTokens", .num_tokens = 0, .num_rows = 16},
    {.name = "ManyBlocksOfTokens", .num_tokens = 1500, .hidden = 8},
    {.name = "ManyWraps",
     .num_ranks = 3,
     .num_tokens = 700,
     .top_k = 3,
     .num_experts = 9,
     .hidden = 512},
    {.name = "Skewed", .num_tokens = 200, .routing = "skewed"},
    {.name = "Masked", .num_ranks = 4, .top_k = 3, .routing = "masked"},
    {.name = "AllToOne", .num_ranks = 4, .routing = "one"},
    {.name = "NobodyChooses", .routing = "nobody"},
    {.name = "EmptyRank", .num_ranks = 3, .num_experts = 6, .routing = "empty"},
    {.name = "Dropped",
     .num_ranks = 3,
     .num_tokens = 120,
     .num_experts = 9,
     .routing = "skewed",
     .num_rows = 70},
    {.name = "NoRoom", .num_rows = 1, .expert_capacity = 0},
    {.name = "Padded", .num_tokens = 90, .expert_capacity = 25},
    {.name = "PaddedSkewed",
     .num_ranks = 4,
     .num_tokens = 60,
     .routing = "skewed",
     .expert_capacity = 31},
    {.name = "OddHidden", .hidden = 13},
    {.name = "LongRows", .top_k = 5, .hidden = 4104, .dtype = DType::kBF16},
    {.name = "LongOddRows", .top_k = 5, .hidden = 1543, .dtype = DType::kF16},
    {.name = "HiddenOfOne", .hidden = 1, .dtype = DType::kBF16},
    {.name = "Doubles", .num_ranks = 3, .num_experts = 6, .dtype = DType::kF64},
    {.name = "DoublesOdd", .hidden = 7, .dtype = DType::kF64},
    {.name = "Halves", .hidden = 72, .dtype = DType::kF16},
    {.name = "BFloats", .num_ranks = 4, .dtype = DType::kBF16},
    {.name = "OddBytes", .hidden = 37, .dtype = DType::kOther},
    {.name = "Bytes",
     .num_ranks = 3,
     .num_experts = 6,
     .hidden = 48,
     .dtype = DType::kOther},
};

/// On the rank's GPU, which becomes the current one.
inline RankMemory MemoryOf(const Case& one, const Ranks& ranks, int rank,
                           int fill) {
  (void)cudaSetDevice(ranks.devices()[rank]);
  const Shape shape = one.ShapeOf(rank);
  const int64_t choices = int64_t{one.num_tokens} * one.top_k;
  const int64_t token_bytes = one.num_tokens * shape.row_bytes;
  const int weight_bytes = one.dtype == DType::kF64 ? 8 : 4;
  const DType weight_type =
      one.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  RankMemory memory;
  memory.tokens = DeviceBytes(
      Elements(one.dtype, int64_t{one.num_tokens} * one.hidden, 100 + rank));
  memory.ids = DeviceBytes(ToBytes(IdsOf(one, rank)));
  memory.weights = DeviceBytes(Elements(weight_type, choices, 200 + rank));
  memory.rows = DeviceBytes(shape.num_rows * shape.row_bytes, fill);
  memory.group_sizes = DeviceBytes(shape.num_local_experts * 4, fill);
  memory.wanted = DeviceBytes(shape.num_local_experts * 4, fill);
  memory.slots = DeviceBytes(choices * 4, fill);
  memory.sums = DeviceBytes(token_bytes, fill);
  memory.collected = DeviceBytes(token_bytes, fill);
  memory.row_grads = DeviceBytes(shape.num_rows * shape.row_bytes, fill);
  memory.weight_grads = DeviceBytes(choices * weight_bytes, fill);
  return memory;
}

template <typename Call>
void* ScratchFor(const Caller& caller, const Call& call, RankMemory& memory) {
  const int64_t bytes = ScratchBytes(caller, call);
  memory.scratch.push_back(DeviceBytes::Scratch(bytes));
  return memory.scratch.back().as();
}

inline GpuDispatch DispatchOf(const Case& one, int rank,
                              const RankMemory& memory) {
  GpuDispatch call;
  call.shape = one.ShapeOf(rank);
  call.is_deduplicated = one.top_k > 1;
  call.tokens = memory.tokens.as();
  call.expert_ids = memory.ids.as<int32_t>();
  call.rows = memory.rows.as();
  call.group_sizes = memory.group_sizes.as<int32_t>();
  call.wanted = memory.wanted.as<int32_t>();
  call.slots = memory.slots.as<int32_t>();
  return call;
}

inline GpuCombine CombineOf(const Case& one, int rank, const RankMemory& memory,
                            bool has_weights) {
  GpuCombine call;
  call.shape = one.ShapeOf(rank);
  call.dtype = one.dtype;
  call.rows = memory.rows.as();
  call.expert_ids = memory.ids.as<int32_t>();
  call.slots = memory.slots.as<int32_t>();
  call.has_weights = has_weights;
  if (has_weights) call.weights = memory.weights.as();
  call.sums = has_weights ? memory.sums.as() : memory.collected.as();
  return call;
}

inline GpuCombineGrad CombineGradOf(const Case& one, int rank,
                                    const RankMemory& memory) {
  GpuCombineGrad call;
  call.shape = one.ShapeOf(rank);
  call.dtype = one.dtype;
  call.sum_grads = memory.tokens.as();
  call.rows = memory.rows.as();
  call.expert_ids = memory.ids.as<int32_t>();
  call.slots = memory.slots.as<int32_t>();
  call.weights = memory.weights.as();
  call.group_sizes = memory.group_sizes.as<int32_t>();
  call.row_grads = memory.row_grads.as();
  call.weight_grads = memory.weight_grads.as();
  return call;
}

/// One exchange of each kind, one after the other: dispatch, combine,
/// dispatch's gradient, combine's gradient (rows that cannot be added up:
/// dispatch alone). Returns what each rank said to each. `is_counted`: those
/// after the dispatch are told that they follow it.
inline std::vector<Status> RunExchanges(const Case& one, Ranks& ranks,
                                        std::vector<RankMemory>& memory,
                                        bool is_counted = false) {
  std::vector<Status> said;
  const auto run = [&](auto make, auto exchange) {
    for (const Status& status : ranks.Call([&](const Caller& caller) {
           RankMemory& own = memory[caller.rank];
           auto call = make(caller.rank, own);
           call.scratch = ScratchFor(caller, call, own);
           return exchange(caller, call);
         })) {
      said.push_back(status);
    }
  };
  run([&](int rank, auto& own) { return DispatchOf(one, rank, own); },
      &RunDispatch);
  if (one.dtype == DType::kOther) return said;
  for (const bool has_weights : {true, false}) {
    run(
        [&](int rank, auto& own) {
          GpuCombine call = CombineOf(one, rank, own, has_weights);
          call.is_counted = is_counted;
          return call;
        },
        &RunCombine);
  }
  run(
      [&](int rank, auto& own) {
        GpuCombineGrad call = CombineGradOf(one, rank, own);
        call.is_counted = is_counted;
        return call;
      },
      &RunCombineGrad);
  return said;
}

}  // namespace turbobus::moe::cuda::testing

#endif  // TURBOBUS_MOE_CUDA_PACKED_CASES_H_

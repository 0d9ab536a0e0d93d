#ifndef TURBOBUS_MOE_CUDA_RAGGED_PROBLEM_H_
#define TURBOBUS_MOE_CUDA_RAGGED_PROBLEM_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "moe/cuda/ragged.h"
#include "moe/ragged_exchange.h"

// Ragged exchanges for tests: random ones, and what they come to row by row and
// on CPU devices. Nothing here needs a GPU.

namespace turbobus::moe::cuda {

using Bytes = std::vector<uint8_t>;

/// A call of all ranks.
struct Problem {
  RaggedSizes sizes;
  std::vector<std::vector<int32_t>> tables;  // By rank: [num_tables, 4, slices]
  std::vector<Bytes> sources;                // By rank.
  std::vector<Bytes> results;                // By rank: what is there before.
  bool is_onto_zeros = false;

  int each() const { return sizes.num_slices / sizes.num_ranks; }
  int32_t& At(int rank, int64_t table, int field, int slice) {
    return tables[rank][(table * 4 + field) * sizes.num_slices + slice];
  }
  /// `[num_tables, num_ranks, 4, num_slices]`, as the CPU exchange wants it.
  std::vector<int32_t> Gathered() const {
    std::vector<int32_t> all;
    const int64_t size = int64_t{4} * sizes.num_slices;
    for (int64_t t = 0; t < sizes.num_tables; ++t) {
      for (const auto& table : tables) {
        all.insert(all.end(), table.begin() + t * size,
                   table.begin() + (t + 1) * size);
      }
    }
    return all;
  }
};

enum class Kind { kDisjoint, kOverlapping, kOneSender, kOneReceiver, kEmpty };

inline Problem MakeProblem(RaggedSizes sizes, Kind kind, unsigned seed,
                           bool is_transpose = false) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t limit) {
    return limit <= 0
               ? 0
               : static_cast<int32_t>(random() % static_cast<uint64_t>(limit));
  };
  Problem problem;
  problem.sizes = sizes;
  problem.tables.assign(
      sizes.num_ranks,
      std::vector<int32_t>(sizes.num_tables * 4 * sizes.num_slices));
  const int each = problem.each();
  for (int64_t t = 0; t < sizes.num_tables; ++t) {
    std::vector<int64_t> filled(sizes.num_ranks);
    for (int r = 0; r < sizes.num_ranks; ++r) {
      for (int i = 0; i < sizes.num_slices; ++i) {
        const int to = i / each;
        // The rows that are left at the receiver, shared fairly.
        int64_t most = std::min(sizes.operand_rows,
                                2 * sizes.output_rows / sizes.num_slices);
        if (kind != Kind::kOverlapping) {
          most = std::min(most, sizes.output_rows - filled[to]);
        }
        int32_t size = random() % 4 == 0 ? 0 : below(most + 1);
        if (kind == Kind::kEmpty || (kind == Kind::kOneSender && r != 0) ||
            (kind == Kind::kOneReceiver && to != sizes.num_ranks - 1)) {
          size = 0;
        }
        const int32_t begin = kind == Kind::kOverlapping
                                  ? below(sizes.output_rows - size + 1)
                                  : static_cast<int32_t>(filled[to]);
        filled[to] += size;
        problem.At(r, t, 0, i) = below(sizes.operand_rows - size + 1);
        problem.At(r, t, 1, i) = size;
        problem.At(r, t, 2, i) = begin;
        problem.At(to, t, 3, r * each + i % each) = size;
      }
    }
  }
  const int64_t operand_bytes =
      sizes.num_batches * sizes.operand_rows * sizes.row_bytes;
  const int64_t output_bytes =
      sizes.num_batches * sizes.output_rows * sizes.row_bytes;
  for (int r = 0; r < sizes.num_ranks; ++r) {
    problem.sources.emplace_back(is_transpose ? output_bytes : operand_bytes);
    problem.results.emplace_back(is_transpose ? operand_bytes : output_bytes);
    for (uint8_t& byte : problem.sources[r]) byte = random();
    for (uint8_t& byte : problem.results[r]) byte = random();
  }
  return problem;
}

inline constexpr Kind kKinds[] = {Kind::kDisjoint, Kind::kOverlapping,
                                  Kind::kOneSender, Kind::kOneReceiver,
                                  Kind::kEmpty};

/// Finite values: what becomes of a NaN's payload is nobody's promise.
template <typename T>
void FillWithNumbers(std::vector<Bytes>& rows, unsigned seed) {
  std::mt19937 random(seed);
  for (Bytes& bytes : rows) {
    for (size_t i = 0; i + sizeof(T) <= bytes.size(); i += sizeof(T)) {
      T value;
      if constexpr (sizeof(T) == 2) {
        // Of any sign and of exponents that make sums round, in both formats.
        value = static_cast<uint16_t>(random() & 0x83ff) | 0x3800;
      } else {
        value = static_cast<T>(static_cast<int>(random() % 2001) - 1000) /
                static_cast<T>(7);
      }
      std::memcpy(bytes.data() + i, &value, sizeof(T));
    }
  }
}

/// Slice by slice, row by row.
inline std::vector<Bytes> SlowPush(Problem problem) {
  const RaggedSizes& s = problem.sizes;
  if (problem.is_onto_zeros) {
    for (Bytes& result : problem.results)
      std::fill(result.begin(), result.end(), 0);
  }
  for (int64_t batch = 0; batch < s.num_batches; ++batch) {
    const int64_t table = s.num_tables == 1 ? 0 : batch;
    for (int to = 0; to < s.num_ranks; ++to) {
      for (int from = 0; from < s.num_ranks; ++from) {
        for (int i = to * problem.each(); i < (to + 1) * problem.each(); ++i) {
          for (int row = 0; row < problem.At(from, table, 1, i); ++row) {
            const int64_t in =
                batch * s.operand_rows + problem.At(from, table, 0, i) + row;
            const int64_t out =
                batch * s.output_rows + problem.At(from, table, 2, i) + row;
            std::copy_n(problem.sources[from].begin() + in * s.row_bytes,
                        s.row_bytes,
                        problem.results[to].begin() + out * s.row_bytes);
          }
        }
      }
    }
  }
  return problem.results;
}

class CpuMember : public RaggedMember {
 public:
  void Done(const Status&) override {}
};

/// What CPU devices make of it.
inline std::vector<Bytes> RunOnCpu(Problem problem, RaggedDirection direction,
                                   RowElement element) {
  const RaggedSizes& s = problem.sizes;
  const std::vector<int32_t> tables = problem.Gathered();
  std::vector<std::unique_ptr<Member>> members;
  for (int r = 0; r < s.num_ranks; ++r) {
    auto member = std::make_unique<CpuMember>();
    member->shape = {.direction = direction,
                     .num_ranks = s.num_ranks,
                     .num_slices = s.num_slices,
                     .num_batches = s.num_batches,
                     .num_tables = s.num_tables,
                     .operand_rows = s.operand_rows,
                     .output_rows = s.output_rows,
                     .row_bytes = s.row_bytes,
                     .element = element};
    member->tables = tables;
    member->source =
        reinterpret_cast<const std::byte*>(problem.sources[r].data());
    member->result = reinterpret_cast<std::byte*>(problem.results[r].data());
    members.push_back(std::move(member));
  }
  auto work = MakeRaggedWork(members);
  EXPECT_TRUE(work.ok()) << work.status();
  if (!work.ok()) return {};
  for (int64_t i = 0; i < (*work)->num_pieces(); ++i) (*work)->Run(i);
  return problem.results;
}

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RAGGED_PROBLEM_H_

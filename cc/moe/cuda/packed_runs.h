#ifndef TURBOBUS_MOE_CUDA_PACKED_RUNS_H_
#define TURBOBUS_MOE_CUDA_PACKED_RUNS_H_

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "moe/cuda/packed_cases.h"

// All exchanges of a case, there and back, for tests that compare ways.

namespace turbobus::moe::cuda::testing {

/// What all ranks have, by name, after an exchange there and back.
struct Results {
  std::vector<std::pair<std::string, Bytes>> of;
};

inline void ExpectOk(const std::vector<Status>& said) {
  for (const Status& status : said) EXPECT_TRUE(status.ok()) << status;
}

inline std::vector<RankMemory> MemoryOfAll(const Case& one, const Ranks& ranks,
                                           int fill = 0x5a) {
  std::vector<RankMemory> memory;
  for (int r = 0; r < one.num_ranks; ++r) {
    memory.push_back(MemoryOf(one, ranks, r, fill));
  }
  return memory;
}

/// A rank's dispatch, in scratch of its own.
inline Status Dispatch(const Case& one, const Caller& caller, RankMemory& own) {
  GpuDispatch call = DispatchOf(one, caller.rank, own);
  call.scratch = ScratchFor(caller, call, own);
  return RunDispatch(caller, call);
}

inline Results ResultsOf(const Case& one,
                         const std::vector<RankMemory>& memory) {
  Results results;
  for (int r = 0; r < one.num_ranks; ++r) {
    const std::string of_rank = " of rank " + std::to_string(r);
    const auto add = [&](const char* name, const DeviceBytes& bytes) {
      results.of.emplace_back(name + of_rank, bytes.Read());
    };
    add("rows", memory[r].rows);
    add("group_sizes", memory[r].group_sizes);
    add("wanted", memory[r].wanted);
    add("slots", memory[r].slots);
    if (one.dtype == DType::kOther) continue;
    add("sums", memory[r].sums);
    add("collected", memory[r].collected);
    add("row_grads", memory[r].row_grads);
    add("weight_grads", memory[r].weight_grads);
  }
  return results;
}

/// All four exchanges, one after the other. `is_counted`: those after the first
/// are told that they follow it.
inline Results RunAll(const Case& one, How how, int fill,
                      bool is_counted = false) {
  Ranks ranks(WiringOf(one.num_ranks, how), std::chrono::seconds(20));
  std::vector<RankMemory> memory = MemoryOfAll(one, ranks, fill);
  ExpectOk(RunExchanges(one, ranks, memory, is_counted));
  return ResultsOf(one, memory);
}

inline void ExpectSame(const Results& got, const Results& want) {
  ASSERT_EQ(got.of.size(), want.of.size());
  for (size_t i = 0; i < got.of.size(); ++i) {
    EXPECT_TRUE(got.of[i].second == want.of[i].second) << want.of[i].first;
  }
}

}  // namespace turbobus::moe::cuda::testing

#endif  // TURBOBUS_MOE_CUDA_PACKED_RUNS_H_

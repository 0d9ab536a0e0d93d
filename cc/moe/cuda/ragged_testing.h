#ifndef TURBOBUS_MOE_CUDA_RAGGED_TESTING_H_
#define TURBOBUS_MOE_CUDA_RAGGED_TESTING_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/gpu_ragged.h"
#include "moe/cuda/ragged_problem.h"

// What tests of ragged exchanges on GPUs share.

namespace turbobus::moe::cuda {

#define ASSERT_CUDA(expression) ASSERT_EQ(expression, cudaSuccess)

/// Memory of the current device between guards.
class GuardedBuffer {
 public:
  static constexpr int64_t kGuardBytes = 4096;
  static constexpr uint8_t kGuard = 0xa5;

  explicit GuardedBuffer(const Bytes& content) : memory_(Guarded(content)) {}

  uint8_t* data() const { return memory_.as() + kGuardBytes; }

  Bytes Read() const {
    const Bytes all = memory_.Read();
    const auto is_guard = [](uint8_t byte) { return byte == kGuard; };
    EXPECT_TRUE(std::all_of(all.begin(), all.begin() + kGuardBytes, is_guard) &&
                std::all_of(all.end() - kGuardBytes, all.end(), is_guard));
    return {all.begin() + kGuardBytes, all.end() - kGuardBytes};
  }

 private:
  static Bytes Guarded(const Bytes& content) {
    Bytes all(content.size() + 2 * kGuardBytes, kGuard);
    std::copy(content.begin(), content.end(), all.begin() + kGuardBytes);
    return all;
  }

  testing::DeviceBytes memory_;
};

/// What one rank of a problem has on the current device, and its call.
class RaggedRank {
 public:
  /// `dtype` kOther: a push, else a sum.
  RaggedRank(const Problem& problem, int rank, DType dtype)
      : table_(testing::ToBytes(problem.tables[rank])),
        source_(problem.sources[rank]),
        result_(problem.results[rank]) {
    call_.sizes = problem.sizes;
    call_.sizes.rank = rank;
    call_.dtype = dtype;
    call_.is_onto_zeros = problem.is_onto_zeros;
    call_.table = reinterpret_cast<const int32_t*>(table_.data());
    call_.source = source_.data();
    call_.result = result_.data();
    scratch_ = std::make_unique<GuardedBuffer>(
        Bytes(is_sum() ? RaggedSumScratchBytes(call_.sizes)
                       : RaggedPushScratchBytes(call_.sizes)));
    call_.scratch = scratch_->data();
    call_.allocate = [this](int64_t size_bytes) -> StatusOr<void*> {
      boxes_.push_back(testing::DeviceBytes::Scratch(size_bytes));
      return boxes_.back().as<void>();
    };
  }

  Status Run(const Caller& caller) const {
    return is_sum() ? RunRaggedSum(caller, call_)
                    : RunRaggedPush(caller, call_);
  }

  Bytes Result() const {
    (void)source_.Read();  // Its guards.
    return result_.Read();
  }

 private:
  bool is_sum() const { return call_.dtype != DType::kOther; }

  GuardedBuffer table_, source_, result_;
  std::deque<testing::DeviceBytes> boxes_;
  std::unique_ptr<GuardedBuffer> scratch_;
  GpuRagged call_;
};

inline std::vector<std::unique_ptr<RaggedRank>> OnGpus(
    const Problem& problem, const testing::Ranks& ranks,
    DType dtype = DType::kOther) {
  std::vector<std::unique_ptr<RaggedRank>> on_gpus;
  for (int r = 0; r < ranks.size(); ++r) {
    EXPECT_EQ(cudaSetDevice(ranks.devices()[r]), cudaSuccess);
    on_gpus.push_back(std::make_unique<RaggedRank>(problem, r, dtype));
  }
  return on_gpus;
}

/// What the ranks have after `num_calls` calls, and the status of the last.
struct Outcome {
  std::vector<Bytes> results;
  std::vector<Status> statuses;
};

inline Outcome RunOnGpus(const Problem& problem, DType dtype,
                         testing::Ranks& ranks, int num_calls) {
  const auto on_gpus = OnGpus(problem, ranks, dtype);
  Outcome outcome;
  outcome.statuses = ranks.Run([&](int rank) {
    Status last;
    for (int i = 0; i < num_calls; ++i) {
      last = on_gpus[rank]->Run(ranks.Next(rank));
    }
    return last;
  });
  for (const auto& rank : on_gpus) outcome.results.push_back(rank->Result());
  return outcome;
}

inline Outcome RunOnGpus(const Problem& problem, DType dtype,
                         int num_calls = 1) {
  testing::Ranks ranks(problem.sizes.num_ranks);
  return RunOnGpus(problem, dtype, ranks, num_calls);
}

/// The same of ranks that do not reach each other's memory.
inline Outcome RunApart(const Problem& problem, DType dtype,
                        int num_calls = 1) {
  Wiring wiring;
  wiring.is_direct = false;
  for (int r = 0; r < problem.sizes.num_ranks; ++r) {
    wiring.devices.push_back(testing::DeviceOf(r));
  }
  testing::Ranks ranks(wiring, std::chrono::seconds(20));
  return RunOnGpus(problem, dtype, ranks, num_calls);
}

inline void ExpectSame(const Outcome& got, const std::vector<Bytes>& want) {
  for (size_t r = 0; r < want.size(); ++r) {
    EXPECT_TRUE(got.statuses[r].ok()) << got.statuses[r];
    ASSERT_EQ(got.results[r].size(), want[r].size());
    const auto at =
        std::mismatch(want[r].begin(), want[r].end(), got.results[r].begin());
    EXPECT_TRUE(at.first == want[r].end())
        << "rank " << r << " differs from byte " << at.first - want[r].begin()
        << " of " << want[r].size();
  }
}

class GpuRaggedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
    ASSERT_CUDA(cudaSetDevice(0));
  }
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RAGGED_TESTING_H_

#ifndef TURBOBUS_MOE_CUDA_RAGGED_TESTING_H_
#define TURBOBUS_MOE_CUDA_RAGGED_TESTING_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "moe/cuda/gpu_ragged.h"
#include "moe/cuda/gpu_testing.h"
#include "moe/cuda/ragged_problem.h"

// What tests of ragged exchanges on GPUs share. Ranks are host threads with a
// stream each; they share the cards there are.

namespace turbobus::moe::cuda {

#define ASSERT_CUDA(expression) ASSERT_EQ(expression, cudaSuccess)

template <typename T>
cudaError_t Allocate(T** memory, int64_t size_bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory),
                    static_cast<size_t>(size_bytes));
}

/// Device memory between guards.
class GuardedBuffer {
 public:
  static constexpr int64_t kGuardBytes = 4096;
  static constexpr uint8_t kGuard = 0xa5;

  explicit GuardedBuffer(const Bytes& content) : size_(content.size()) {
    Bytes all(size_ + 2 * kGuardBytes, kGuard);
    std::copy(content.begin(), content.end(), all.begin() + kGuardBytes);
    EXPECT_EQ(Allocate(&memory_, all.size()), cudaSuccess);
    EXPECT_EQ(
        cudaMemcpy(memory_, all.data(), all.size(), cudaMemcpyHostToDevice),
        cudaSuccess);
  }
  ~GuardedBuffer() { cudaFree(memory_); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  uint8_t* data() const { return memory_ + kGuardBytes; }

  Bytes Read() const {
    Bytes all(size_ + 2 * kGuardBytes);
    EXPECT_EQ(
        cudaMemcpy(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost),
        cudaSuccess);
    const auto is_guard = [](uint8_t byte) { return byte == kGuard; };
    EXPECT_TRUE(std::all_of(all.begin(), all.begin() + kGuardBytes, is_guard) &&
                std::all_of(all.end() - kGuardBytes, all.end(), is_guard));
    return {all.begin() + kGuardBytes, all.end() - kGuardBytes};
  }

 private:
  size_t size_;
  uint8_t* memory_ = nullptr;
};

/// What the ranks have after `num_calls` calls, and the status of the last.
struct Outcome {
  std::vector<Bytes> results;
  std::vector<Status> statuses;
};

inline Outcome RunOnGpus(const Problem& problem, DType dtype,
                         int num_calls = 1) {
  static int64_t run_id = 0;
  ++run_id;
  BlockingMeeting meeting(std::chrono::milliseconds(20000));
  const int num_ranks = problem.sizes.num_ranks;
  Outcome outcome;
  outcome.results.resize(num_ranks);
  outcome.statuses.resize(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const int device = rank % NumGpus();
      ASSERT_CUDA(cudaSetDevice(device));
      cudaStream_t stream = nullptr;
      ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      const auto* table_bytes =
          reinterpret_cast<const uint8_t*>(problem.tables[rank].data());
      const GuardedBuffer table(
          {table_bytes, table_bytes + 4 * problem.tables[rank].size()});
      const GuardedBuffer source(problem.sources[rank]);
      const GuardedBuffer result(problem.results[rank]);
      GpuRagged call;
      call.sizes = problem.sizes;
      call.sizes.rank = rank;
      call.dtype = dtype;
      call.is_onto_zeros = problem.is_onto_zeros;
      call.table = reinterpret_cast<const int32_t*>(table.data());
      call.source = source.data();
      call.result = result.data();
      const bool is_sum = dtype != DType::kOther;
      const GuardedBuffer scratch(
          Bytes(is_sum ? RaggedSumScratchBytes(call.sizes)
                       : RaggedPushScratchBytes(call.sizes)));
      call.scratch = scratch.data();
      ASSERT_CUDA(cudaDeviceSynchronize());
      for (int i = 0; i < num_calls; ++i) {
        Caller caller;
        caller.op = "ragged_all_to_all over axis 'x'";
        caller.device = device;
        caller.rank = rank;
        caller.num_ranks = num_ranks;
        caller.key = {.run_id = run_id, .position = i};
        caller.stream = stream;
        caller.meeting = &meeting;
        outcome.statuses[rank] =
            is_sum ? RunRaggedSum(caller, call) : RunRaggedPush(caller, call);
      }
      ASSERT_CUDA(cudaStreamSynchronize(stream));
      outcome.results[rank] = result.Read();
      (void)source.Read();
      ASSERT_CUDA(cudaStreamDestroy(stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcome;
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

/// Skips where ranks cannot meet.
class GpuRaggedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumGpus() == 0) GTEST_SKIP() << "CUDA sees no GPU";
    static const bool can_meet = EnablePeerAccess();
    if (!can_meet) GTEST_SKIP() << "the GPUs do not reach each other's memory";
    ASSERT_CUDA(cudaSetDevice(0));
  }
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RAGGED_TESTING_H_

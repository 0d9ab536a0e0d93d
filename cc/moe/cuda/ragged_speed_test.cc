#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "moe/cuda/gpu_ragged.h"
#include "moe/cuda/ragged_testing.h"

// Asked for by name (--gtest_also_run_disabled_tests): how long kernels take.

namespace turbobus::moe::cuda {
namespace {

using RaggedSpeedTest = GpuRaggedTest;

/// Times kernels alone, on one card: what they read lies in the same memory.
class Stopwatch {
 public:
  Stopwatch() {
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
  }
  template <typename Enqueue>
  double Seconds(Enqueue enqueue) {
    std::vector<float> times;
    for (int i = 0; i < 12; ++i) {
      cudaEventRecord(begin_);
      enqueue();
      cudaEventRecord(end_);
      cudaEventSynchronize(end_);
      float milliseconds = 0;
      cudaEventElapsedTime(&milliseconds, begin_, end_);
      times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] / 1e3;
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

TEST_F(RaggedSpeedTest, DISABLED_SpeedBesideMemcpy) {
  Stopwatch stopwatch;
  for (const int64_t mebibytes : {1, 32, 512}) {
    for (const int64_t row_bytes : {4, 4095, 8192}) {
      for (const int each : {1, 32, 512}) {
        const int64_t rows = (mebibytes << 20) / row_bytes;
        const int num_slices = 2 * each;
        const auto per_slice = static_cast<int32_t>(rows / num_slices);
        std::vector<int32_t> table;
        for (int i = 0; i < num_slices; ++i) table.push_back(i * per_slice);
        table.resize(2 * num_slices, per_slice);
        // Rank 0's; rank 1's are behind them in the result.
        for (int i = 0; i < num_slices; ++i)
          table.push_back(i % each * per_slice);
        table.resize(4 * num_slices, per_slice);
        std::vector<int32_t> second = table;
        for (int i = 0; i < num_slices; ++i)
          second[2 * num_slices + i] += each * per_slice;
        const int64_t bytes = rows * row_bytes;
        RaggedSizes sizes = {.num_ranks = 2,
                             .num_slices = num_slices,
                             .operand_rows = rows,
                             .output_rows = rows,
                             .row_bytes = row_bytes};
        const auto buffer = testing::DeviceBytes::Scratch(3 * bytes);
        uint8_t* const memory = buffer.as();
        std::vector<int32_t> both = table;
        both.insert(both.end(), second.begin(), second.end());
        const testing::DeviceBytes on_device(testing::ToBytes(both));
        const auto* const tables = on_device.as<int32_t>();
        const auto scratch = testing::DeviceBytes::Scratch(
            RaggedPushScratchBytes(sizes) + RaggedSumScratchBytes(sizes));
        RaggedPushArgs push;
        RaggedSumArgs sum;
        for (int r = 0; r < 2; ++r) {
          push.tables.of[r] = sum.tables.of[r] = tables + r * table.size();
          push.results.of[r] = memory + (1 + r) * bytes;
          sum.cotangents.of[r] = memory + r * bytes;
        }
        push.operand = memory;
        sum.result = memory + 2 * bytes;
        push.scratch = sum.scratch = scratch.as();
        const double copy = stopwatch.Seconds([&] {
          cudaMemcpyAsync(memory + 2 * bytes, memory, bytes,
                          cudaMemcpyDeviceToDevice);
        });
        const double pushed =
            stopwatch.Seconds([&] { LaunchRaggedPush(sizes, push, nullptr); });
        double summed = 0;
        if (row_bytes % 4 == 0) {
          summed = stopwatch.Seconds(
              [&] { LaunchRaggedSum(sizes, DType::kF32, sum, nullptr); });
        }
        ASSERT_CUDA(cudaGetLastError());
        std::printf(
            "%4ld MiB, rows of %4ld bytes, %4d slices: memcpy %7.1f us %6.0f "
            "GB/s, push %7.1f us %6.0f GB/s, sum %7.1f us %6.0f GB/s\n",
            static_cast<long>(mebibytes), static_cast<long>(row_bytes),
            num_slices, copy * 1e6, bytes / copy / 1e9, pushed * 1e6,
            bytes / pushed / 1e9, summed * 1e6,
            summed > 0 ? bytes / summed / 1e9 : 0);
      }
    }
  }
}

}  // namespace
}  // namespace turbobus::moe::cuda

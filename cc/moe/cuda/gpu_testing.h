#ifndef TURBOBUS_MOE_CUDA_GPU_TESTING_H_
#define TURBOBUS_MOE_CUDA_GPU_TESTING_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "moe/blocking_meeting.h"
#include "moe/cuda/gpu_exchange.h"

// What tests of exchanges on GPUs share: ranks on host threads and streams of
// their own. There may be more ranks than GPUs: then several share one, so that
// one GPU is enough to run what is between ranks.

namespace turbobus::moe::cuda {

inline int NumGpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// Device memory for a test.
class DeviceArray {
 public:
  /// What memory is full of before it is written: no small integer, and NaN in
  /// no dtype of ours but fp8.
  static constexpr int kUnwritten = 0xA5;

  /// `size_bytes` of memory; filled with `kUnwritten`, or not at all, so that
  /// initcheck sees what is read before it is written.
  DeviceArray(int device, size_t size_bytes, bool is_filled = true)
      : size_bytes_(size_bytes) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, size_bytes + 1), cudaSuccess);
    memory_.reset(static_cast<uint8_t*>(memory));
    if (is_filled) {
      EXPECT_EQ(cudaMemset(memory, kUnwritten, size_bytes), cudaSuccess);
    }
  }

  template <typename T>
  DeviceArray(int device, const std::vector<T>& from)
      : DeviceArray(device, from.size() * sizeof(T), false) {
    EXPECT_EQ(cudaMemcpy(memory_.get(), from.data(), size_bytes_,
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }

  template <typename T = uint8_t>
  T* data() const {
    return reinterpret_cast<T*>(memory_.get());
  }

  template <typename T>
  std::vector<T> Read() const {
    std::vector<T> to(size_bytes_ / sizeof(T));
    EXPECT_EQ(
        cudaMemcpy(to.data(), memory_.get(), size_bytes_, cudaMemcpyDefault),
        cudaSuccess);
    return to;
  }

 private:
  struct Free {
    void operator()(uint8_t* memory) const { (void)cudaFree(memory); }
  };
  size_t size_bytes_;
  std::unique_ptr<uint8_t, Free> memory_;
};

/// Lets every GPU reach the memory of every other; false if one cannot.
inline bool EnablePeerAccess() {
  const int num_gpus = NumGpus();
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    if (cudaSetDevice(gpu) != cudaSuccess) return false;
    for (int peer = 0; peer < num_gpus; ++peer) {
      if (peer != gpu && cudaDeviceEnablePeerAccess(peer, 0) != cudaSuccess) {
        return false;
      }
    }
  }
  return true;
}

/// Ranks with a stream each, spread over the GPUs there are.
class GpuRanks {
 public:
  explicit GpuRanks(int num_ranks, std::chrono::milliseconds timeout =
                                       std::chrono::seconds(60))
      : meeting_(timeout), streams_(num_ranks), positions_(num_ranks) {
    for (int r = 0; r < num_ranks; ++r) {
      EXPECT_EQ(cudaSetDevice(device(r)), cudaSuccess);
      EXPECT_EQ(cudaStreamCreateWithFlags(&streams_[r], cudaStreamNonBlocking),
                cudaSuccess);
    }
  }
  ~GpuRanks() {
    for (cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
  }
  GpuRanks(const GpuRanks&) = delete;
  GpuRanks& operator=(const GpuRanks&) = delete;

  int size() const { return static_cast<int>(streams_.size()); }
  /// One GPU for all, if they cannot reach each other's memory.
  int device(int rank) const {
    static const int num_gpus = EnablePeerAccess() ? NumGpus() : 1;
    return rank % num_gpus;
  }
  cudaStream_t stream(int rank) const { return streams_[rank]; }
  const BlockingMeeting& meeting() const { return meeting_; }

  /// The next call of a rank; all ranks make the same calls.
  Caller Next(int rank, std::string op) {
    return {.op = std::move(op),
            .device = device(rank),
            .rank = rank,
            .num_ranks = size(),
            .key = {.run_id = 1, .position = positions_[rank]++},
            .stream = streams_[rank],
            .meeting = &meeting_,
            .wiring = {}};
  }

  /// Runs every rank on a thread, its device current; returns by rank what it
  /// returned, once the streams are done.
  std::vector<Status> Run(const std::function<Status(int rank)>& run) {
    std::vector<Status> statuses(size());
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        EXPECT_EQ(cudaSetDevice(device(r)), cudaSuccess);
        // Arrays are filled on another stream.
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        statuses[r] = run(r);
        EXPECT_EQ(cudaStreamSynchronize(streams_[r]), cudaSuccess);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

 private:
  BlockingMeeting meeting_;
  std::vector<cudaStream_t> streams_;
  std::vector<int64_t> positions_;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_GPU_TESTING_H_

#ifndef TURBOBUS_MOE_CUDA_EXCHANGE_RANKS_H_
#define TURBOBUS_MOE_CUDA_EXCHANGE_RANKS_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "moe/cuda/gpu_exchange.h"

// What tests of exchanges need: several ranks of one process, each with a host
// thread and a stream. They take the GPUs that there are in turn, and share one
// if need be.

namespace turbobus::moe::cuda::testing {

inline int NumGpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  (void)cudaGetLastError();
  return count;
}

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  }
};

/// Where a rank is: on a GPU of its own if there are enough.
inline int DeviceOf(int rank) { return rank % NumGpus(); }

/// Whether every GPU's kernels reach the memory of every other, which this lets
/// them.
inline bool ReachEachOther() {
  static const bool can_reach = [] {
    for (int gpu = 0; gpu < NumGpus(); ++gpu) {
      (void)cudaSetDevice(gpu);
      for (int peer = 0; peer < NumGpus(); ++peer) {
        if (peer == gpu) continue;
        const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
        (void)cudaGetLastError();
        if (error != cudaSuccess &&
            error != cudaErrorPeerAccessAlreadyEnabled) {
          return false;
        }
      }
    }
    return true;
  }();
  return can_reach;
}

/// Waits for all GPUs; the first stays current.
inline cudaError_t Synchronize() {
  cudaError_t error = cudaSuccess;
  for (int device = NumGpus() - 1; device >= 0; --device) {
    (void)cudaSetDevice(device);
    const cudaError_t here = cudaDeviceSynchronize();
    if (here != cudaSuccess) error = here;
  }
  return error;
}

/// Streams stand still at it until it is opened.
class Gate {
 public:
  Gate() = default;
  ~Gate() {
    Open();
    (void)Synchronize();
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void Block(cudaStream_t stream) {
    (void)cudaLaunchHostFunc(
        stream,
        [](void* is_open) {
          while (!*static_cast<std::atomic<bool>*>(is_open)) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        },
        &is_open_);
  }
  void Open() { is_open_ = true; }
  /// Opens it as soon as `is_time`, or at the limit; returns which.
  std::future<bool> OpenWhen(std::function<bool()> is_time,
                             std::chrono::milliseconds limit) {
    return std::async(std::launch::async, [this, is_time, limit] {
      const auto end = std::chrono::steady_clock::now() + limit;
      while (!is_time() && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const bool is_in_time = is_time();
      Open();
      return is_in_time;
    });
  }

 private:
  std::atomic<bool> is_open_ = false;
};

using Bytes = std::vector<uint8_t>;

/// Memory of the current device with bytes in it.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  explicit DeviceBytes(const Bytes& bytes) : size_(bytes.size()) {
    Allocate();
    (void)cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyDefault);
    // Our streams do not wait for the one that this is done on.
    (void)cudaDeviceSynchronize();
  }
  DeviceBytes(int64_t size, int fill) : size_(static_cast<size_t>(size)) {
    Allocate();
    (void)cudaMemset(data_, fill, size_);
    (void)cudaDeviceSynchronize();
  }
  /// Memory that nobody has written.
  static DeviceBytes Scratch(int64_t size) {
    DeviceBytes memory;
    memory.size_ = static_cast<size_t>(size);
    memory.Allocate();
    return memory;
  }
  ~DeviceBytes() { (void)cudaFree(data_); }
  DeviceBytes(DeviceBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  template <typename T = uint8_t>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return size_; }
  template <typename T = uint8_t>
  std::vector<T> Read() const {
    std::vector<T> values(size_ / sizeof(T));
    (void)cudaMemcpy(values.data(), data_, size_, cudaMemcpyDefault);
    return values;
  }

 private:
  void Allocate() { (void)cudaMalloc(&data_, size_ == 0 ? 1 : size_); }

  void* data_ = nullptr;
  size_t size_ = 0;
};

template <typename T>
Bytes ToBytes(const std::vector<T>& values) {
  const auto* data = reinterpret_cast<const uint8_t*>(values.data());
  return Bytes(data, data + values.size() * sizeof(T));
}

/// Runs a rank's part on a thread for each; returns what each said.
inline std::vector<Status> OnRanks(const std::vector<int>& devices,
                                   const std::function<Status(int)>& part) {
  const int num_ranks = static_cast<int>(devices.size());
  std::vector<Status> said(num_ranks);
  std::vector<std::thread> threads;
  threads.reserve(num_ranks);
  for (int r = 0; r < num_ranks; ++r) {
    threads.emplace_back([&, r] {
      (void)cudaSetDevice(devices[r]);
      said[r] = part(r);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return said;
}

/// Ranks that find each other.
class Ranks {
 public:
  Ranks(Wiring wiring, std::chrono::milliseconds timeout)
      : meeting_(timeout),
        wiring_(std::move(wiring)),
        next_positions_(wiring_.devices.size()) {
    for (const int device : wiring_.devices) {
      (void)cudaSetDevice(device);
      (void)cudaStreamCreateWithFlags(&streams_.emplace_back(),
                                      cudaStreamNonBlocking);
    }
    (void)cudaSetDevice(0);
  }
  /// Ranks that reach each other's memory: on one GPU, if GPUs do not.
  explicit Ranks(int num_ranks,
                 std::chrono::milliseconds timeout = std::chrono::seconds(20))
      : Ranks(Direct(num_ranks), timeout) {}
  ~Ranks() {
    (void)Synchronize();
    for (const cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int size() const { return static_cast<int>(streams_.size()); }
  const std::vector<int>& devices() const { return wiring_.devices; }
  cudaStream_t stream(int rank) const { return streams_[rank]; }
  const BlockingMeeting& meeting() const { return meeting_; }

  /// A rank's view of call number `position`.
  Caller CallerOf(int rank, int64_t position) {
    Caller caller;
    caller.op = "exchange over axis 'x'";
    caller.device = wiring_.devices[rank];
    caller.rank = rank;
    caller.num_ranks = size();
    caller.key = {.run_id = 1, .position = position, .group = 0};
    caller.stream = streams_[rank];
    caller.meeting = &meeting_;
    caller.wiring = wiring_;
    return caller;
  }

  /// The next call of a rank; all ranks make the same calls.
  Caller Next(int rank) { return CallerOf(rank, next_positions_[rank]++); }

  /// One call of all ranks, and the device's work behind it.
  std::vector<Status> Call(const std::function<Status(const Caller&)>& part) {
    return Run([&](int rank) { return part(Next(rank)); });
  }

  /// Any number of calls, the same of all ranks, and the device's work behind
  /// them.
  std::vector<Status> Run(const std::function<Status(int rank)>& part) {
    auto said = OnRanks(devices(), part);
    const cudaError_t error = Synchronize();
    if (error != cudaSuccess) {
      said[0] = Internal(std::string("the device: ") + cudaGetErrorName(error));
    }
    return said;
  }

 private:
  static Wiring Direct(int num_ranks) {
    Wiring wiring;
    for (int r = 0; r < num_ranks; ++r) {
      wiring.devices.push_back(ReachEachOther() ? DeviceOf(r) : 0);
    }
    return wiring;
  }

  BlockingMeeting meeting_;
  Wiring wiring_;
  std::vector<cudaStream_t> streams_;
  std::vector<int64_t> next_positions_;
};

}  // namespace turbobus::moe::cuda::testing

#endif  // TURBOBUS_MOE_CUDA_EXCHANGE_RANKS_H_

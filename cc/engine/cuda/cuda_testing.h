#ifndef TURBOBUS_ENGINE_CUDA_CUDA_TESTING_H_
#define TURBOBUS_ENGINE_CUDA_CUDA_TESTING_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "engine/cuda/shared_cards.h"
#include "engine/stream_engine.h"
#include "engine/stream_testing.h"
#include "transport/cuda/cuda_streams.h"

// What tests of the stream engine on real GPUs share.

namespace turbobus::engine {

using Bytes = std::vector<uint8_t>;

#define ASSERT_CUDA(expression) ASSERT_EQ(expression, cudaSuccess)

inline int NumCards() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

/// At least two, so that there are relays: see `SharedCards`.
inline int NumGpus() { return std::max(NumCards(), 2); }

inline Bytes RandomBytes(int64_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(static_cast<size_t>(size));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

class Pinned {
 public:
  explicit Pinned(const Bytes& content) : Pinned(content.size()) {
    std::memcpy(memory_, content.data(), size_);
  }
  explicit Pinned(size_t size) : size_(size) {
    EXPECT_EQ(cudaHostAlloc(&memory_, size_, cudaHostAllocPortable),
              cudaSuccess);
    std::memset(memory_, 0, size_);
  }
  ~Pinned() { cudaFreeHost(memory_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  Bytes Read() const {
    const auto* const begin = static_cast<const uint8_t*>(memory_);
    return {begin, begin + size_};
  }

 private:
  size_t size_;
  void* memory_ = nullptr;
};

class OnDevice {
 public:
  OnDevice(int gpu, size_t size) : size_(size) {
    EXPECT_EQ(cudaSetDevice(gpu % NumCards()), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&memory_, size), cudaSuccess);
    EXPECT_EQ(cudaMemset(memory_, 0xee, size), cudaSuccess);
    // Nothing orders that with the engine's streams.
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  OnDevice(int gpu, const Bytes& content) : OnDevice(gpu, content.size()) {
    EXPECT_EQ(cudaMemcpy(memory_, content.data(), size_, cudaMemcpyDefault),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  ~OnDevice() { cudaFree(memory_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  Bytes Read() const {
    Bytes bytes(size_);
    EXPECT_EQ(cudaMemcpy(bytes.data(), memory_, size_, cudaMemcpyDeviceToHost),
              cudaSuccess);
    return bytes;
  }

 private:
  size_t size_;
  void* memory_ = nullptr;
};

/// An engine over all paths of at least two GPUs, and a stream of the program's
/// own for each.
class CudaEngineTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumCards() == 0) GTEST_SKIP() << "no GPU";
    setenv("JAX_TURBOBUS_LOCK_DIR", testing::TempDir().c_str(), 1);
    auto cards = transport::cuda::CudaStreams::Create();
    ASSERT_TRUE(cards.ok()) << cards.status();
    for (int gpu = 0; gpu < NumGpus(); ++gpu) {
      ASSERT_CUDA(cudaSetDevice(gpu % NumCards()));
      ASSERT_CUDA(cudaStreamCreateWithFlags(&xla_.emplace_back(),
                                            cudaStreamNonBlocking));
    }
    auto streams = MakeStreams(std::move(*cards));
    streams_ = streams.get();
    auto engine = StreamEngine::Create(std::move(streams), AllPaths(NumGpus()),
                                       Settings());
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = std::move(*engine);
  }
  void TearDown() override {
    engine_.reset();
    if (IsSkipped()) return;
    for (const cudaStream_t stream : xla_) cudaStreamDestroy(stream);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }

  virtual std::unique_ptr<SharedCards> MakeStreams(
      std::unique_ptr<transport::cuda::CudaStreams> cards) {
    return std::make_unique<SharedCards>(std::move(cards), NumGpus());
  }
  virtual StreamSettings Settings() { return SmallBlocks(); }

  CopyRequest Request(int gpu, topo::Direction direction, const void* src,
                      void* dst, int64_t size_bytes) {
    return {.call = "test",
            .gpu = gpu,
            .direction = direction,
            .stream = xla_[gpu],
            .run = 1,
            .src = src,
            .dst = dst,
            .size_bytes = size_bytes};
  }
  DoneRequest DoneOf(const CopyRequest& start) {
    return {.call = "done",
            .gpu = start.gpu,
            .stream = start.stream,
            .run = start.run,
            .buffer = start.dst};
  }
  /// Row `index` of a stack of contiguous rows.
  RowRequest Row(int gpu, const Pinned& stack, int32_t num_rows,
                 const OnDevice& index, const OnDevice& row, int64_t row_bytes,
                 bool is_store = false) {
    transport::RowCopy copy;
    copy.stack = stack.data();
    copy.row = row.data();
    copy.index = reinterpret_cast<const int32_t*>(index.data());
    copy.num_rows = num_rows;
    copy.piece_bytes = row_bytes;
    copy.stride_bytes = num_rows * row_bytes;
    copy.is_store = is_store;
    return {
        .call = "row", .gpu = gpu, .stream = xla_[gpu], .run = 1, .row = copy};
  }
  int64_t RelayedBytes() {
    int64_t bytes = 0;
    for (const PathStats& path : engine_->stats().paths) {
      if (path.path.is_relay()) bytes += path.size_bytes;
    }
    return bytes;
  }

  std::vector<cudaStream_t> xla_;
  SharedCards* streams_ = nullptr;
  std::unique_ptr<StreamEngine> engine_;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_CUDA_CUDA_TESTING_H_

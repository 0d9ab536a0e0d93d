// The stream engine on real GPUs, small enough for compute-sanitizer. What it
// decides is tested on streams without a machine
// (engine/stream_*_test.cc).

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "engine/stream_engine.h"
#include "engine/stream_testing.h"
#include "transport/cuda/cuda_streams.h"

namespace turbobus::engine {
namespace {

using topo::Direction;
using transport::RowCopy;
using transport::cuda::CudaStreams;

using Bytes = std::vector<uint8_t>;

#define ASSERT_CUDA(expression) ASSERT_EQ(expression, cudaSuccess)

int NumGpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

Bytes RandomBytes(int64_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(static_cast<size_t>(size));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

class Pinned {
 public:
  explicit Pinned(const Bytes& content) : size_(content.size()) {
    EXPECT_EQ(cudaHostAlloc(&memory_, size_, cudaHostAllocPortable),
              cudaSuccess);
    std::memcpy(memory_, content.data(), size_);
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
    EXPECT_EQ(cudaSetDevice(gpu), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&memory_, size), cudaSuccess);
    EXPECT_EQ(cudaMemset(memory_, 0xee, size), cudaSuccess);
    // Nothing orders that with the engine's streams.
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

class CudaEngineTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumGpus() == 0) GTEST_SKIP() << "no GPU";
    setenv("JAX_TURBOBUS_LOCK_DIR", testing::TempDir().c_str(), 1);
    auto streams = CudaStreams::Create();
    ASSERT_TRUE(streams.ok()) << streams.status();
    for (int gpu = 0; gpu < NumGpus(); ++gpu) {
      ASSERT_CUDA(cudaSetDevice(gpu));
      ASSERT_CUDA(cudaStreamCreateWithFlags(&xla_.emplace_back(),
                                            cudaStreamNonBlocking));
    }
    auto engine = StreamEngine::Create(std::move(*streams), AllPaths(NumGpus()),
                                       SmallBlocks());
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = std::move(*engine);
  }
  void TearDown() override {
    engine_.reset();
    if (IsSkipped()) return;
    for (const cudaStream_t stream : xla_) cudaStreamDestroy(stream);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }

  CopyRequest Request(int gpu, Direction direction, const void* src, void* dst,
                      int64_t size_bytes) {
    return {.call = "test",
            .gpu = gpu,
            .direction = direction,
            .stream = xla_[gpu],
            .run = 1,
            .src = src,
            .dst = dst,
            .size_bytes = size_bytes};
  }

  std::vector<cudaStream_t> xla_;
  std::unique_ptr<StreamEngine> engine_;
};

TEST_F(CudaEngineTest, BytesSurviveEveryWayToDriveLanes) {
  for (const bool is_lock_step : {false, true}) {
    for (const auto relay_streams :
         {RelayStreams::kPerLeg, RelayStreams::kPerSlot,
          RelayStreams::kPerSlotLoose}) {
      StreamSettings settings = SmallBlocks();
      settings.is_lock_step = is_lock_step;
      settings.relay_streams = relay_streams;
      ASSERT_EQ(engine_->SetSettings(settings), OkStatus());
      for (int gpu = 0; gpu < NumGpus(); ++gpu) {
        for (const int64_t size : {int64_t{1}, 100 * kKiB, 900 * kKiB + 3}) {
          const Bytes bytes = RandomBytes(size, static_cast<uint64_t>(size));
          const Pinned in(bytes);
          const Pinned out(Bytes(bytes.size()));
          const OnDevice device(gpu, bytes.size());
          ASSERT_EQ(engine_->Copy(Request(gpu, Direction::kH2d, in.data(),
                                          device.data(), size)),
                    OkStatus());
          ASSERT_EQ(engine_->Copy(Request(gpu, Direction::kD2h, device.data(),
                                          out.data(), size)),
                    OkStatus());
          ASSERT_CUDA(cudaStreamSynchronize(xla_[gpu]));
          ASSERT_EQ(device.Read(), bytes);
          ASSERT_EQ(out.Read(), bytes);
        }
      }
    }
  }
  EXPECT_EQ(engine_->stats().num_pooled > 0, NumGpus() > 1);
}

TEST_F(CudaEngineTest, TheSourceMayBeOverwrittenRightAfter) {
  constexpr int64_t kSize = 700 * kKiB;
  const Bytes bytes = RandomBytes(kSize, 5);
  const Pinned in(bytes);
  const Pinned out(Bytes(bytes.size()));
  const OnDevice device(0, bytes.size());
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(engine_->Copy(
                  Request(0, Direction::kH2d, in.data(), device.data(), kSize)),
              OkStatus());
    ASSERT_EQ(engine_->Copy(Request(0, Direction::kD2h, device.data(),
                                    out.data(), kSize)),
              OkStatus());
    ASSERT_CUDA(cudaMemsetAsync(device.data(), i, kSize, xla_[0]));
  }
  ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
  EXPECT_EQ(out.Read(), bytes);
  EXPECT_EQ(device.Read(), Bytes(bytes.size(), 19));
}

TEST_F(CudaEngineTest, StartedTransfersAreCompleteAfterDone) {
  constexpr int64_t kSize = 500 * kKiB;
  const Bytes bytes = RandomBytes(kSize, 6);
  const Pinned in(bytes);
  const OnDevice device(0, bytes.size());
  const CopyRequest request =
      Request(0, Direction::kH2d, in.data(), device.data(), kSize);
  ASSERT_EQ(engine_->Start(request), OkStatus());
  ASSERT_EQ(engine_->Done({.call = "done",
                           .gpu = 0,
                           .stream = xla_[0],
                           .run = 1,
                           .buffer = device.data()}),
            OkStatus());
  ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
  EXPECT_EQ(device.Read(), bytes);
}

TEST_F(CudaEngineTest, RowsAreFetchedAndStoredWhereTheDeviceSays) {
  constexpr int32_t kRows = 5;
  // Once on the GPU's own cores, once with relays; the last is no multiple of
  // what a thread copies.
  for (const int64_t row_bytes : {48 * kKiB, 300 * kKiB, 200 * kKiB + 3}) {
    const Bytes bytes = RandomBytes(kRows * row_bytes, 7);
    const Pinned stack(bytes);
    const Pinned stored(Bytes(bytes.size()));
    const OnDevice row(0, static_cast<size_t>(row_bytes));
    const OnDevice index(0, sizeof(int32_t));
    for (int32_t i = 0; i < kRows; ++i) {
      ASSERT_CUDA(
          cudaMemcpy(index.data(), &i, sizeof(i), cudaMemcpyHostToDevice));
      ASSERT_CUDA(cudaDeviceSynchronize());
      RowCopy copy;
      copy.stack = stack.data();
      copy.row = row.data();
      copy.index = reinterpret_cast<const int32_t*>(index.data());
      copy.num_rows = kRows;
      copy.piece_bytes = row_bytes;
      copy.stride_bytes = kRows * row_bytes;
      const auto request = [&] {
        return RowRequest{
            .call = "row", .gpu = 0, .stream = xla_[0], .run = 1, .row = copy};
      };
      ASSERT_EQ(engine_->CopyRow(request()), OkStatus());
      copy.stack = stored.data();
      copy.is_store = true;
      ASSERT_EQ(engine_->CopyRow(request()), OkStatus());
      ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
    }
    EXPECT_EQ(stored.Read(), bytes) << row_bytes;
  }
}

TEST_F(CudaEngineTest, NothingGrowsOverManyTransfers) {
  constexpr int64_t kSize = 260 * kKiB;
  const Pinned in(RandomBytes(kSize, 8));
  const OnDevice device(0, kSize);
  const auto run = [&](int count) {
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(engine_->Copy(Request(0, Direction::kH2d, in.data(),
                                      device.data(), kSize)),
                OkStatus());
      if (i % 10 != 9) continue;
      ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
    }
    ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
  };
  run(50);
  const int64_t num_events = engine_->stats().num_events;
  size_t free_before = 0;
  size_t free_after = 0;
  size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&free_before, &total));
  run(300);
  ASSERT_CUDA(cudaMemGetInfo(&free_after, &total));
  EXPECT_EQ(engine_->stats().num_events, num_events);
  EXPECT_EQ(free_before, free_after);
}

TEST_F(CudaEngineTest, PathsAreMeasured) {
  std::vector<int> direct;
  const auto paths = engine_->stats().paths;
  for (size_t i = 0; i < paths.size(); ++i) {
    if (!paths[i].path.is_relay()) direct.push_back(static_cast<int>(i));
  }
  const auto rates = engine_->Measure(direct, 512 * kKiB, 64 * kKiB);
  ASSERT_TRUE(rates.ok()) << rates.status();
  ASSERT_EQ(rates->size(), direct.size());
  for (const double rate : *rates) EXPECT_GT(rate, 0);
}

TEST_F(CudaEngineTest, AnotherProcessThatLendsIsRespected) {
  if (NumGpus() < 2) GTEST_SKIP() << "needs 2 GPUs, CUDA sees " << NumGpus();
  // As good as another process: the lock is on a file opened anew.
  auto streams = CudaStreams::Create();
  ASSERT_TRUE(streams.ok()) << streams.status();
  EXPECT_EQ((*streams)->LockLender(1).code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace turbobus::engine

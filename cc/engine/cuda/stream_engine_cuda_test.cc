// The stream engine on real GPUs, small enough for compute-sanitizer. What it
// decides is tested on streams without a machine
// (engine/stream_*_test.cc).

#include <cstring>
#include <string>
#include <vector>

#include "engine/cuda/cuda_testing.h"

namespace turbobus::engine {
namespace {

using topo::Direction;
using transport::cuda::CudaStreams;

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
          const Pinned out(bytes.size());
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
  EXPECT_GT(engine_->stats().num_pooled, 0);
  EXPECT_GT(RelayedBytes(), 0);
}

TEST_F(CudaEngineTest, TheSourceMayBeOverwrittenRightAfter) {
  constexpr int64_t kSize = 700 * kKiB;
  const Bytes bytes = RandomBytes(kSize, 5);
  const Pinned in(bytes);
  const Pinned out(bytes.size());
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
  ASSERT_EQ(engine_->Done(DoneOf(request)), OkStatus());
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
    const Pinned stored(bytes.size());
    const OnDevice row(0, static_cast<size_t>(row_bytes));
    const OnDevice index(0, sizeof(int32_t));
    for (int32_t i = 0; i < kRows; ++i) {
      ASSERT_CUDA(
          cudaMemcpy(index.data(), &i, sizeof(i), cudaMemcpyHostToDevice));
      ASSERT_CUDA(cudaDeviceSynchronize());
      ASSERT_EQ(engine_->CopyRow(Row(0, stack, kRows, index, row, row_bytes)),
                OkStatus());
      ASSERT_EQ(
          engine_->CopyRow(Row(0, stored, kRows, index, row, row_bytes, true)),
          OkStatus());
      ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
    }
    EXPECT_EQ(stored.Read(), bytes) << row_bytes;
  }
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
  // As good as another process: the lock is on a file opened anew.
  auto streams = CudaStreams::Create();
  ASSERT_TRUE(streams.ok()) << streams.status();
  EXPECT_EQ((*streams)->LockLender(0).code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace turbobus::engine

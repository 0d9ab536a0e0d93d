#include <cuda.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/cuda/cuda_testing.h"

// What a transfer costs the host, call by call, printed for people. Two GPUs
// may be one card: its link is then shared by what two would carry, which
// changes when copies end, but not what issuing them takes.

namespace turbobus::engine {
namespace {

using topo::Direction;
using transport::CopyKind;

/// Adds up the host's time in each kind of call.
class TimedCards : public SharedCards {
 public:
  enum Kind { kRecord, kWait, kDirect, kPcie, kFabric, kYield, kNumKinds };
  static constexpr const char* kNames[] = {"record", "wait",   "direct",
                                           "pcie",   "fabric", "yield"};
  struct Sum {
    int64_t time_ns = 0;
    int64_t num = 0;
  };

  using SharedCards::SharedCards;

  std::array<Sum, kNumKinds> sums;
  /// Whose copies are direct ones.
  Stream xla = nullptr;

  Status Record(int gpu, Event event, Stream stream) override {
    return Timed(kRecord,
                 [&] { return SharedCards::Record(gpu, event, stream); });
  }
  Status Wait(Stream stream, Event event) override {
    return Timed(kWait, [&] { return SharedCards::Wait(stream, event); });
  }
  Status Copy(Stream stream, void* dst, const void* src, int64_t size_bytes,
              CopyKind kind) override {
    return Timed(
        kind == CopyKind::kD2d ? kFabric
        : stream == xla        ? kDirect
                               : kPcie,
        [&] { return SharedCards::Copy(stream, dst, src, size_bytes, kind); });
  }
  Status Yield(int gpu, Stream stream) override {
    return Timed(kYield, [&] { return SharedCards::Yield(gpu, stream); });
  }

 private:
  template <typename Call>
  Status Timed(Kind kind, const Call& call) {
    const int64_t start_ns = NowNs();
    Status status = call();
    sums[kind].time_ns += NowNs() - start_ns;
    ++sums[kind].num;
    return status;
  }
};

class CudaHandlerTimeTest : public CudaEngineTest {
 protected:
  std::unique_ptr<SharedCards> MakeStreams(
      std::unique_ptr<transport::cuda::CudaStreams> cards) override {
    auto timed = std::make_unique<TimedCards>(std::move(cards), NumGpus());
    timed->xla = xla_[0];
    return timed;
  }
  StreamSettings Settings() override { return {}; }

  TimedCards& timed() { return static_cast<TimedCards&>(*streams_); }

  /// Makes `stream` wait until the returned word is set.
  static void Hold(cudaStream_t stream, const Pinned& word) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    ASSERT_CUDA(cudaGetDriverEntryPointByVersion(
        "cuStreamWaitValue32", &found, 12000, cudaEnableDefault, &result));
    const auto wait = reinterpret_cast<CUresult (*)(
        CUstream, CUdeviceptr, cuuint32_t, unsigned)>(found);
    *Word(word) = 0;
    ASSERT_EQ(wait(stream, reinterpret_cast<CUdeviceptr>(word.data()), 1,
                   CU_STREAM_WAIT_VALUE_EQ),
              CUDA_SUCCESS);
  }
  /// Copies on `other_` until 20 ms from now, from before it returns.
  void KeepBusy(void* dst, const void* src) {
    constexpr size_t kBytes = size_t{1} << 30;
    ASSERT_CUDA(cudaMemcpyAsync(dst, src, 1 << 20, cudaMemcpyDefault, other_));
    ASSERT_CUDA(cudaEventRecord(begun_, other_));
    ASSERT_CUDA(cudaMemcpyAsync(dst, src, kBytes, cudaMemcpyDefault, other_));
    ASSERT_CUDA(cudaEventSynchronize(begun_));
  }

  static volatile uint32_t* Word(const Pinned& word) {
    return reinterpret_cast<volatile uint32_t*>(word.data());
  }

  cudaStream_t other_ = nullptr;
  cudaEvent_t begun_ = nullptr;
};

TEST_F(CudaHandlerTimeTest, DISABLED_OfTransfersByKindOfCall) {
  constexpr int kCalls = 15;
  constexpr int64_t kMiB = 1 << 20;
  const Pinned host(size_t{1} << 30);
  const Pinned other_host(size_t{1} << 30);
  const OnDevice device(0, size_t{1} << 30);
  const OnDevice other_device(0, size_t{1} << 30);
  const Pinned word(64);
  ASSERT_CUDA(cudaSetDevice(0));
  ASSERT_CUDA(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking));
  ASSERT_CUDA(cudaEventCreate(&begun_));
  enum Scene { kFree, kHeld, kHeldBesideH2d, kHeldBesideD2h };
  for (const Scene scene : {kFree, kHeld, kHeldBesideH2d, kHeldBesideD2h}) {
    for (const int64_t size : {16 * kMiB, 256 * kMiB, 1024 * kMiB}) {
      for (const Direction direction : {Direction::kH2d, Direction::kD2h}) {
        const CopyRequest request =
            direction == Direction::kH2d
                ? Request(0, direction, host.data(), device.data(), size)
                : Request(0, direction, device.data(), host.data(), size);
        int64_t blocks_before = 0;
        for (int i = -2; i < kCalls; ++i) {
          if (i == 0) {
            timed().sums = {};
            for (const PathStats& path : engine_->stats().paths) {
              if (path.path.is_relay()) blocks_before += path.num_blocks;
            }
          }
          if (scene == kHeldBesideH2d || scene == kHeldBesideD2h) {
            KeepBusy(scene == kHeldBesideH2d ? other_device.data()
                                             : other_host.data(),
                     scene == kHeldBesideH2d ? other_host.data()
                                             : other_device.data());
          }
          if (scene != kFree) Hold(xla_[0], word);
          ASSERT_EQ(engine_->Copy(request), OkStatus());
          *Word(word) = 1;
          ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
          ASSERT_CUDA(cudaStreamSynchronize(other_));
        }
        const StreamStats stats = engine_->stats();
        int64_t blocks = -blocks_before;
        for (const PathStats& path : stats.paths) {
          if (path.path.is_relay()) blocks += path.num_blocks;
        }
        std::vector<int64_t> times(stats.handler_ns.end() - kCalls,
                                   stats.handler_ns.end());
        std::ranges::sort(times);
        std::printf("%-16s %s %4lld MiB %2lld relayed: p50 %6.1f us",
                    std::array{"free", "held", "held beside h2d",
                               "held beside d2h"}[scene],
                    direction == Direction::kH2d ? "h2d" : "d2h",
                    static_cast<long long>(size / kMiB),
                    static_cast<long long>(blocks / kCalls),
                    static_cast<double>(times[kCalls / 2]) / 1e3);
        for (int kind = 0; kind < TimedCards::kNumKinds; ++kind) {
          const TimedCards::Sum& sum = timed().sums[kind];
          if (sum.num == 0) continue;
          std::printf("  %s %.1f x %.2f", TimedCards::kNames[kind],
                      static_cast<double>(sum.num) / kCalls,
                      static_cast<double>(sum.time_ns) / 1e3 /
                          static_cast<double>(sum.num));
        }
        std::printf("\n");
      }
    }
  }
  ASSERT_CUDA(cudaStreamDestroy(other_));
}

/// A relay's hop alone, on the relay's stream: to the borrower (as H2D has it)
/// and from it (D2H), nothing of which begins before all has been issued.
TEST_F(CudaHandlerTimeTest, DISABLED_OfHopsBySizeAndDirection) {
  constexpr int kHops = 64;
  constexpr int kRounds = 9;
  constexpr size_t kMost = size_t{16} << 20;
  const OnDevice borrower(0, kHops * kMost);
  const OnDevice staging(1, kMost);
  const Pinned word(64);
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaSetDevice(1 % NumCards()));
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (NumCards() > 1) {
    ASSERT_EQ(streams_->EnablePeerAccess(1, 0), OkStatus());
  }
  for (const bool is_push : {true, false}) {
    for (const size_t size : {kMost / 8, kMost / 4, kMost / 2, kMost}) {
      std::vector<double> times_us;
      for (int round = -1; round < kRounds; ++round) {
        Hold(stream, word);
        const auto start = std::chrono::steady_clock::now();
        for (int hop = 0; hop < kHops; ++hop) {
          std::byte* const there = borrower.data() + hop * kMost;
          ASSERT_EQ(streams_->Copy(stream, is_push ? there : staging.data(),
                                   is_push ? staging.data() : there,
                                   static_cast<int64_t>(size), CopyKind::kD2d),
                    OkStatus());
        }
        const std::chrono::duration<double, std::micro> time =
            std::chrono::steady_clock::now() - start;
        *Word(word) = 1;
        ASSERT_CUDA(cudaStreamSynchronize(stream));
        if (round >= 0) times_us.push_back(time.count() / kHops);
      }
      std::ranges::sort(times_us);
      std::printf("%s %2zu MiB: %.2f us a call\n", is_push ? "to" : "from",
                  size >> 20, times_us[kRounds / 2]);
    }
  }
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace turbobus::engine

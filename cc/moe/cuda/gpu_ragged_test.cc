#include "moe/cuda/gpu_ragged.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "moe/cuda/ragged_faults.h"
#include "moe/ragged_exchange.h"
#include "moe/ragged_plan.h"

// Ranks are host threads with a stream each; they share the cards there are.

namespace turbobus::moe::cuda {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t kGuardBytes = 4096;
constexpr uint8_t kGuard = 0xa5;

int NumDevices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// Why ranks on these devices cannot meet; null if they can.
const char* EnablePeers() {
  static const char* const reason = [] {
    for (int device = 0; device < NumDevices(); ++device) {
      for (int peer = 0; peer < NumDevices(); ++peer) {
        if (device == peer) continue;
        int can_access = 0;
        cudaDeviceCanAccessPeer(&can_access, device, peer);
        if (can_access == 0 || cudaSetDevice(device) != cudaSuccess ||
            cudaDeviceEnablePeerAccess(peer, 0) != cudaSuccess) {
          return "the GPUs do not reach each other's memory";
        }
      }
    }
    return NumDevices() == 0 ? "CUDA sees no GPU" : nullptr;
  }();
  return reason;
}

template <typename T>
cudaError_t Allocate(T** memory, int64_t size_bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory),
                    static_cast<size_t>(size_bytes));
}

#define ASSERT_CUDA(expression) ASSERT_EQ(expression, cudaSuccess)

/// Device memory between guards.
class Buffer {
 public:
  explicit Buffer(const Bytes& content) : size_(content.size()) {
    Bytes all(size_ + 2 * kGuardBytes, kGuard);
    std::copy(content.begin(), content.end(), all.begin() + kGuardBytes);
    EXPECT_EQ(Allocate(&memory_, all.size()), cudaSuccess);
    EXPECT_EQ(
        cudaMemcpy(memory_, all.data(), all.size(), cudaMemcpyHostToDevice),
        cudaSuccess);
  }
  ~Buffer() { cudaFree(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

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

struct Problem {
  RaggedSizes sizes;
  std::vector<std::vector<int32_t>> tables;  // By rank: [num_tables, 4, slices]
  std::vector<Bytes> sources;                // By rank.
  std::vector<Bytes> results;                // By rank: what is there before.
  bool is_onto_zeros = false;

  int each() const { return sizes.num_slices / sizes.num_ranks; }
  int32_t& At(int rank, int64_t table, int field, int slice) {
    return tables[rank][(table * 4 + field) * sizes.num_slices + slice];
  }
  /// `[num_tables, num_ranks, 4, num_slices]`, as the CPU exchange wants it.
  std::vector<int32_t> Gathered() const {
    std::vector<int32_t> all;
    const int64_t size = int64_t{4} * sizes.num_slices;
    for (int64_t t = 0; t < sizes.num_tables; ++t) {
      for (const auto& table : tables) {
        all.insert(all.end(), table.begin() + t * size,
                   table.begin() + (t + 1) * size);
      }
    }
    return all;
  }
};

enum class Kind { kDisjoint, kOverlapping, kOneSender, kOneReceiver, kEmpty };

Problem MakeProblem(RaggedSizes sizes, Kind kind, unsigned seed,
                    bool is_transpose = false) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t limit) {
    return limit <= 0
               ? 0
               : static_cast<int32_t>(random() % static_cast<uint64_t>(limit));
  };
  Problem problem;
  problem.sizes = sizes;
  problem.tables.assign(
      sizes.num_ranks,
      std::vector<int32_t>(sizes.num_tables * 4 * sizes.num_slices));
  const int each = problem.each();
  for (int64_t t = 0; t < sizes.num_tables; ++t) {
    std::vector<int64_t> filled(sizes.num_ranks);
    for (int r = 0; r < sizes.num_ranks; ++r) {
      for (int i = 0; i < sizes.num_slices; ++i) {
        const int to = i / each;
        // The rows that are left at the receiver, shared fairly.
        int64_t most = std::min(sizes.operand_rows,
                                2 * sizes.output_rows / sizes.num_slices);
        if (kind != Kind::kOverlapping) {
          most = std::min(most, sizes.output_rows - filled[to]);
        }
        int32_t size = random() % 4 == 0 ? 0 : below(most + 1);
        if (kind == Kind::kEmpty || (kind == Kind::kOneSender && r != 0) ||
            (kind == Kind::kOneReceiver && to != sizes.num_ranks - 1)) {
          size = 0;
        }
        const int32_t begin = kind == Kind::kOverlapping
                                  ? below(sizes.output_rows - size + 1)
                                  : static_cast<int32_t>(filled[to]);
        filled[to] += size;
        problem.At(r, t, 0, i) = below(sizes.operand_rows - size + 1);
        problem.At(r, t, 1, i) = size;
        problem.At(r, t, 2, i) = begin;
        problem.At(to, t, 3, r * each + i % each) = size;
      }
    }
  }
  const int64_t operand_bytes =
      sizes.num_batches * sizes.operand_rows * sizes.row_bytes;
  const int64_t output_bytes =
      sizes.num_batches * sizes.output_rows * sizes.row_bytes;
  for (int r = 0; r < sizes.num_ranks; ++r) {
    problem.sources.emplace_back(is_transpose ? output_bytes : operand_bytes);
    problem.results.emplace_back(is_transpose ? operand_bytes : output_bytes);
    for (uint8_t& byte : problem.sources[r]) byte = random();
    for (uint8_t& byte : problem.results[r]) byte = random();
  }
  return problem;
}

/// What the ranks have after `num_calls` calls, and the status of the last.
struct Outcome {
  std::vector<Bytes> results;
  std::vector<Status> statuses;
};

Outcome RunOnGpus(const Problem& problem, DType dtype, int num_calls = 1) {
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
      const int device = rank % NumDevices();
      ASSERT_CUDA(cudaSetDevice(device));
      cudaStream_t stream = nullptr;
      ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      const auto* table_bytes =
          reinterpret_cast<const uint8_t*>(problem.tables[rank].data());
      const Buffer table(
          {table_bytes, table_bytes + 4 * problem.tables[rank].size()});
      const Buffer source(problem.sources[rank]);
      const Buffer result(problem.results[rank]);
      GpuRagged call;
      call.sizes = problem.sizes;
      call.sizes.rank = rank;
      call.dtype = dtype;
      call.is_onto_zeros = problem.is_onto_zeros;
      call.table = reinterpret_cast<const int32_t*>(table.data());
      call.source = source.data();
      call.result = result.data();
      const bool is_sum = dtype != DType::kOther;
      const Buffer scratch(Bytes(is_sum ? RaggedSumScratchBytes(call.sizes)
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

/// Slice by slice, row by row.
std::vector<Bytes> SlowPush(Problem problem) {
  const RaggedSizes& s = problem.sizes;
  if (problem.is_onto_zeros) {
    for (Bytes& result : problem.results)
      std::fill(result.begin(), result.end(), 0);
  }
  for (int64_t batch = 0; batch < s.num_batches; ++batch) {
    const int64_t table = s.num_tables == 1 ? 0 : batch;
    for (int to = 0; to < s.num_ranks; ++to) {
      for (int from = 0; from < s.num_ranks; ++from) {
        for (int i = to * problem.each(); i < (to + 1) * problem.each(); ++i) {
          for (int row = 0; row < problem.At(from, table, 1, i); ++row) {
            const int64_t in =
                batch * s.operand_rows + problem.At(from, table, 0, i) + row;
            const int64_t out =
                batch * s.output_rows + problem.At(from, table, 2, i) + row;
            std::copy_n(problem.sources[from].begin() + in * s.row_bytes,
                        s.row_bytes,
                        problem.results[to].begin() + out * s.row_bytes);
          }
        }
      }
    }
  }
  return problem.results;
}

class CpuMember : public RaggedMember {
 public:
  void Done(const Status&) override {}
};

/// What CPU devices make of it.
std::vector<Bytes> RunOnCpu(Problem problem, RaggedDirection direction,
                            RowElement element) {
  const RaggedSizes& s = problem.sizes;
  const std::vector<int32_t> tables = problem.Gathered();
  std::vector<std::unique_ptr<Member>> members;
  for (int r = 0; r < s.num_ranks; ++r) {
    auto member = std::make_unique<CpuMember>();
    member->shape = {.direction = direction,
                     .num_ranks = s.num_ranks,
                     .num_slices = s.num_slices,
                     .num_batches = s.num_batches,
                     .num_tables = s.num_tables,
                     .operand_rows = s.operand_rows,
                     .output_rows = s.output_rows,
                     .row_bytes = s.row_bytes,
                     .element = element};
    member->tables = tables;
    member->source =
        reinterpret_cast<const std::byte*>(problem.sources[r].data());
    member->result = reinterpret_cast<std::byte*>(problem.results[r].data());
    members.push_back(std::move(member));
  }
  auto work = MakeRaggedWork(members);
  EXPECT_TRUE(work.ok()) << work.status();
  if (!work.ok()) return {};
  for (int64_t i = 0; i < (*work)->num_pieces(); ++i) (*work)->Run(i);
  return problem.results;
}

void ExpectSame(const Outcome& got, const std::vector<Bytes>& want) {
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
    if (const char* reason = EnablePeers()) GTEST_SKIP() << reason;
    ASSERT_CUDA(cudaSetDevice(0));
  }
};

constexpr Kind kKinds[] = {Kind::kDisjoint, Kind::kOverlapping,
                           Kind::kOneSender, Kind::kOneReceiver, Kind::kEmpty};

TEST_F(GpuRaggedTest, PushEqualsWritingRowByRow) {
  unsigned seed = 0;
  for (const int num_ranks : {1, 2, 3, 4}) {
    for (const Kind kind : kKinds) {
      for (const int64_t row_bytes : {1, 3, 4, 6, 16, 520, 4096, 20000}) {
        const int64_t rows = row_bytes > 1000 ? 40 : 700;
        const RaggedSizes sizes = {
            .num_ranks = num_ranks,
            .num_slices = num_ranks * (1 + static_cast<int>(seed % 3)),
            .operand_rows = rows + seed % 7,
            .output_rows = rows + 60,
            .row_bytes = row_bytes};
        SCOPED_TRACE("ranks " + std::to_string(num_ranks) + ", kind " +
                     std::to_string(static_cast<int>(kind)) + ", row " +
                     std::to_string(row_bytes));
        Problem problem = MakeProblem(sizes, kind, seed++);
        const std::vector<Bytes> want = SlowPush(problem);
        EXPECT_EQ(want, RunOnCpu(problem, RaggedDirection::kForward,
                                 RowElement::kFloat32));
        ExpectSame(RunOnGpus(problem, DType::kOther), want);
        problem.is_onto_zeros = true;
        ExpectSame(RunOnGpus(problem, DType::kOther), SlowPush(problem));
      }
    }
  }
}

/// Finite values: what becomes of a NaN's payload is nobody's promise.
template <typename T>
void FillWithNumbers(std::vector<Bytes>& rows, unsigned seed) {
  std::mt19937 random(seed);
  for (Bytes& bytes : rows) {
    for (size_t i = 0; i + sizeof(T) <= bytes.size(); i += sizeof(T)) {
      T value;
      if constexpr (sizeof(T) == 2) {
        // Of any sign and of exponents that make sums round, in both formats.
        value = static_cast<uint16_t>(random() & 0x83ff) | 0x3800;
      } else {
        value = static_cast<T>(static_cast<int>(random() % 2001) - 1000) /
                static_cast<T>(7);
      }
      std::memcpy(bytes.data() + i, &value, sizeof(T));
    }
  }
}

TEST_F(GpuRaggedTest, BatchesHaveOneTableOrOneEach) {
  for (const int64_t num_tables : {1, 5}) {
    for (const Kind kind : {Kind::kDisjoint, Kind::kOverlapping}) {
      const RaggedSizes sizes = {.num_ranks = 2,
                                 .num_slices = 6,
                                 .num_batches = 5,
                                 .num_tables = num_tables,
                                 .operand_rows = 300,
                                 .output_rows = 333,
                                 .row_bytes = 84};
      Problem push = MakeProblem(sizes, kind, 7);
      ExpectSame(RunOnGpus(push, DType::kOther), SlowPush(push));
      push.is_onto_zeros = true;
      ExpectSame(RunOnGpus(push, DType::kOther), SlowPush(push));
      Problem sum = MakeProblem(sizes, kind, 8, /*is_transpose=*/true);
      FillWithNumbers<float>(sum.sources, 8);
      ExpectSame(
          RunOnGpus(sum, DType::kF32),
          RunOnCpu(sum, RaggedDirection::kTranspose, RowElement::kFloat32));
    }
  }
}

TEST_F(GpuRaggedTest, ThousandsOfSlicesAndMoreBatchesThanBlocks) {
  for (const Kind kind : {Kind::kDisjoint, Kind::kOverlapping}) {
    const RaggedSizes many = {.num_ranks = 2,
                              .num_slices = 3000,
                              .num_batches = 2,
                              .num_tables = 2,
                              .operand_rows = 9000,
                              .output_rows = 12000,
                              .row_bytes = 20};
    Problem push = MakeProblem(many, kind, 11);
    ExpectSame(RunOnGpus(push, DType::kOther), SlowPush(push));
    push.is_onto_zeros = true;
    ExpectSame(RunOnGpus(push, DType::kOther), SlowPush(push));
    Problem sum = MakeProblem(many, kind, 12, /*is_transpose=*/true);
    FillWithNumbers<float>(sum.sources, 12);
    ExpectSame(
        RunOnGpus(sum, DType::kF32),
        RunOnCpu(sum, RaggedDirection::kTranspose, RowElement::kFloat32));
  }
  const RaggedSizes batches = {.num_ranks = 2,
                               .num_slices = 2,
                               .num_batches = 40000,
                               .operand_rows = 5,
                               .output_rows = 7,
                               .row_bytes = 4};
  const Problem problem = MakeProblem(batches, Kind::kOverlapping, 13);
  ExpectSame(RunOnGpus(problem, DType::kOther), SlowPush(problem));
}

template <typename T>
void CheckSums(DType dtype, RowElement element) {
  unsigned seed = 100;
  for (const int num_ranks : {1, 2, 3, 4}) {
    for (const Kind kind : kKinds) {
      for (const int64_t width : {1, 5, 64, 700}) {
        const RaggedSizes sizes = {
            .num_ranks = num_ranks,
            .num_slices = num_ranks * (1 + static_cast<int>(seed % 5)),
            .operand_rows = 61,
            .output_rows = 400,
            .row_bytes = width * static_cast<int64_t>(sizeof(T))};
        SCOPED_TRACE("ranks " + std::to_string(num_ranks) + ", kind " +
                     std::to_string(static_cast<int>(kind)) + ", width " +
                     std::to_string(width));
        Problem problem =
            MakeProblem(sizes, kind, seed++, /*is_transpose=*/true);
        FillWithNumbers<T>(problem.sources, seed);
        ExpectSame(RunOnGpus(problem, dtype),
                   RunOnCpu(problem, RaggedDirection::kTranspose, element));
      }
    }
  }
}

TEST_F(GpuRaggedTest, SumsHaveTheBitsOfTheCpusInFloat32) {
  CheckSums<float>(DType::kF32, RowElement::kFloat32);
}
TEST_F(GpuRaggedTest, SumsHaveTheBitsOfTheCpusInFloat64) {
  CheckSums<double>(DType::kF64, RowElement::kFloat64);
}
TEST_F(GpuRaggedTest, SumsHaveTheBitsOfTheCpusInFloat16) {
  CheckSums<uint16_t>(DType::kF16, RowElement::kFloat16);
}
TEST_F(GpuRaggedTest, SumsHaveTheBitsOfTheCpusInBfloat16) {
  CheckSums<uint16_t>(DType::kBF16, RowElement::kBfloat16);
}

TEST_F(GpuRaggedTest, ASliceThatDoesNotFitMovesNothingAndTheNextCallSaysSo) {
  const RaggedSizes sizes = {.num_ranks = 2,
                             .num_slices = 4,
                             .operand_rows = 100,
                             .output_rows = 120,
                             .row_bytes = 48};
  struct Wrong {
    int field;
    int32_t value;
    const char* message;
  };
  constexpr int32_t kMost = 2147483647;
  for (const Wrong& wrong : std::initializer_list<Wrong>{
           {0, -1, "stay within the operand's 100 rows"},
           {0, 98, "stay within the operand's 100 rows"},
           {0, kMost, "stay within the operand's 100 rows"},
           {1, -3, "must not be negative"},
           {1, kMost, "stay within the operand's 100 rows"},
           {2, -1, "stay within the result's 120 rows"},
           {2, 118, "stay within the result's 120 rows"},
           {2, kMost, "stay within the result's 120 rows"},
           {3, 4, "expects recv_sizes"}}) {
    SCOPED_TRACE(wrong.message);
    Problem good = MakeProblem(sizes, Kind::kDisjoint, 5);
    // Slice 2 of rank 0: three rows for rank 1.
    good.At(0, 0, 0, 2) = 10;
    good.At(0, 0, 1, 2) = 3;
    good.At(0, 0, 2, 2) = 7;
    good.At(1, 0, 3, 0) = 3;
    Problem bad = good;
    if (wrong.field == 3) {
      bad.At(1, 0, 3, 0) = wrong.value;
    } else {
      bad.At(0, 0, wrong.field, 2) = wrong.value;
    }
    Problem without = good;
    without.At(0, 0, 1, 2) = without.At(1, 0, 3, 0) = 0;
    ExpectSame(RunOnGpus(bad, DType::kOther), SlowPush(without));

    const Outcome told = RunOnGpus(good, DType::kOther);
    for (const Status& status : told.statuses) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
      const std::string text(status.message());
      EXPECT_NE(text.find("slice 2 of rank 0, for rank 1"), std::string::npos)
          << text;
      EXPECT_NE(text.find(wrong.message), std::string::npos) << text;
    }
    EXPECT_EQ(told.results, good.results);  // Nothing ran.
    ExpectSame(RunOnGpus(good, DType::kOther), SlowPush(good));

    // A transpose takes such a slice for one that was not sent.
    Problem sum = MakeProblem(sizes, Kind::kDisjoint, 6, true);
    FillWithNumbers<float>(sum.sources, 6);
    bad.sources = without.sources = sum.sources;
    bad.results = without.results = sum.results;
    ExpectSame(
        RunOnGpus(bad, DType::kF32),
        RunOnCpu(without, RaggedDirection::kTranspose, RowElement::kFloat32));
  }
}

TEST_F(GpuRaggedTest, WhatWasUnderWayWhenAMisfitWasToldOfIsNotToldOfAgain) {
  const RaggedSizes sizes = {.num_ranks = 2,
                             .num_slices = 2,
                             .operand_rows = 100,
                             .output_rows = 120,
                             .row_bytes = 64};
  const Problem good = MakeProblem(sizes, Kind::kDisjoint, 5);
  Problem bad = good;
  bad.At(0, 0, 0, 1) = -7;
  int num_told = 0;
  for (int i = 0; i < 4; ++i) {
    const Outcome outcome = RunOnGpus(i < 2 ? bad : good, DType::kOther, 20);
    num_told += !outcome.statuses[0].ok();
  }
  // The second of the bad runs may end in the error or in a further misfit.
  EXPECT_LE(num_told, 2);
  ExpectSame(RunOnGpus(good, DType::kOther), SlowPush(good));
}

TEST_F(GpuRaggedTest, ARankThatDoesNotComeFailsTheOthers) {
  BlockingMeeting meeting(std::chrono::milliseconds(200));
  Caller caller;
  caller.op = "ragged_all_to_all over axis 'x'";
  caller.num_ranks = 2;
  caller.meeting = &meeting;
  GpuRagged call;
  call.sizes = {.num_ranks = 2, .num_slices = 2};
  const Status status = RunRaggedPush(caller, call);
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.message().find("ragged_all_to_all over axis 'x'"),
            std::string::npos)
      << status;
}

TEST_F(GpuRaggedTest, ManyCallsInARow) {
  const RaggedSizes sizes = {.num_ranks = 4,
                             .num_slices = 8,
                             .operand_rows = 500,
                             .output_rows = 700,
                             .row_bytes = 260};
  const Problem problem = MakeProblem(sizes, Kind::kOverlapping, 21);
  ExpectSame(RunOnGpus(problem, DType::kOther, 300), SlowPush(problem));
}

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

TEST_F(GpuRaggedTest, DISABLED_SpeedBesideMemcpy) {
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
        uint8_t* memory = nullptr;
        ASSERT_CUDA(Allocate(&memory, 3 * bytes));
        int32_t* tables = nullptr;
        ASSERT_CUDA(Allocate(&tables, 8 * table.size()));
        ASSERT_CUDA(cudaMemcpy(tables, table.data(), 4 * table.size(),
                               cudaMemcpyHostToDevice));
        ASSERT_CUDA(cudaMemcpy(tables + table.size(), second.data(),
                               4 * table.size(), cudaMemcpyHostToDevice));
        uint8_t* scratch = nullptr;
        ASSERT_CUDA(Allocate(&scratch, RaggedPushScratchBytes(sizes) +
                                           RaggedSumScratchBytes(sizes)));
        RaggedPushArgs push;
        RaggedSumArgs sum;
        for (int r = 0; r < 2; ++r) {
          push.tables.of[r] = sum.tables.of[r] = tables + r * table.size();
          push.results.of[r] = memory + (1 + r) * bytes;
          sum.cotangents.of[r] = memory + r * bytes;
        }
        push.operand = memory;
        sum.result = memory + 2 * bytes;
        push.scratch = sum.scratch = scratch;
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
        cudaFree(memory);
        cudaFree(tables);
        cudaFree(scratch);
      }
    }
  }
}

}  // namespace
}  // namespace turbobus::moe::cuda

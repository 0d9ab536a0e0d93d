#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "moe/cuda/events.h"
#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/side_streams.h"

// How fast GPUs that do not reach each other exchange, and where the time of a
// layer goes, printed for people. What rings carry by themselves `profile`
// measures, and single kernels `bench experts --cases parts`. Ranks that share
// a GPU share its link: give them half the tokens to compare.

namespace turbobus::moe::cuda {
namespace {

using testing::DeviceBytes;
using testing::Ranks;
using testing::ToBytes;
using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::duration<double, std::milli>;

[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

constexpr int kRanks = 2;

Wiring Apart(bool has_mail, bool is_broadcast) {
  Wiring wiring;
  wiring.is_direct = false;
  wiring.most_mailed_bytes = has_mail ? int64_t{4} << 20 : -1;
  wiring.is_broadcast = is_broadcast;
  for (int r = 0; r < kRanks; ++r) {
    wiring.devices.push_back(testing::DeviceOf(r));
  }
  return wiring;
}

/// Of bfloat16.
struct Batch {
  int num_tokens;
  int hidden;
  int num_experts;
  int top_k;

  Shape ShapeOf(int rank) const {
    Shape shape;
    shape.rank = rank;
    shape.num_ranks = kRanks;
    shape.num_tokens = num_tokens;
    shape.top_k = top_k;
    shape.num_experts = num_experts;
    shape.num_local_experts = num_experts / kRanks;
    shape.row_bytes = hidden * 2;
    shape.num_rows = int64_t{num_tokens} * top_k * 5 / 4;
    return shape;
  }
};

/// One rank's dispatch and combine, with experts that return their rows.
struct Layer {
  const Shape shape;
  int64_t num_sent = 0;  // Tokens to the other rank.
  DeviceBytes tokens, ids, weights, rows, sizes, slots, sums, early;
  DeviceBytes scratch[2];

  Layer(const Batch& batch, Ranks& ranks, int rank)
      : shape(batch.ShapeOf(rank)) {
    (void)cudaSetDevice(ranks.devices()[rank]);
    const int64_t choices = int64_t{batch.num_tokens} * batch.top_k;
    std::mt19937 random(rank);
    std::vector<int32_t> chosen;
    for (int t = 0; t < batch.num_tokens; ++t) {
      bool is_sent = false;
      for (int j = 0; j < batch.top_k; ++j) {
        chosen.push_back(static_cast<int32_t>(random() % batch.num_experts));
        is_sent |= chosen.back() / shape.num_local_experts != rank;
      }
      num_sent += is_sent;
    }
    ids = DeviceBytes(ToBytes(chosen));
    tokens = DeviceBytes(batch.num_tokens * shape.row_bytes, 1);
    weights = DeviceBytes(ToBytes(std::vector<float>(choices, 0.5f)));
    rows = DeviceBytes(shape.num_rows * shape.row_bytes, 0);
    sizes = DeviceBytes(8 * shape.num_local_experts, 0);
    slots = DeviceBytes(4 * choices, 0);
    sums = DeviceBytes(batch.num_tokens * shape.row_bytes, 0);
    early = DeviceBytes(4 * choices, 0);
    const Caller caller = ranks.CallerOf(rank, 0);
    scratch[0] = DeviceBytes::Scratch(ScratchBytes(caller, Dispatch()));
    scratch[1] = DeviceBytes::Scratch(ScratchBytes(caller, Combine()));
  }

  GpuDispatch Dispatch(bool is_counted = false) const {
    GpuDispatch call;
    call.shape = shape;
    call.tokens = tokens.as();
    call.expert_ids = ids.as<int32_t>();
    call.rows = rows.as();
    call.group_sizes = sizes.as<int32_t>();
    call.wanted = call.group_sizes + shape.num_local_experts;
    call.slots = slots.as<int32_t>();
    if (is_counted) call.early = early.as();
    call.scratch = scratch[0].as();
    return call;
  }
  GpuCombine Combine(bool is_counted = false) const {
    GpuCombine call;
    call.shape = shape;
    call.is_counted = is_counted;
    call.dtype = DType::kBF16;
    call.rows = rows.as();
    call.expert_ids = ids.as<int32_t>();
    call.slots = slots.as<int32_t>();
    call.weights = weights.as();
    call.sums = sums.as();
    call.scratch = scratch[1].as();
    return call;
  }
};

using PackedSpeed = testing::GpuTest;

TEST_F(PackedSpeed, DISABLED_OfDispatchAndCombine) {
  constexpr int kRounds = 4;
  constexpr int kCalls = 8;
  for (const Batch& batch :
       {Batch{4096, 4096, 64, 2}, Batch{16384, 2048, 128, 8},
        Batch{32, 4096, 64, 2}, Batch{128, 4096, 64, 2},
        Batch{256, 4096, 64, 2}, Batch{512, 4096, 64, 2}}) {
    for (const auto& [has_mail, is_broadcast] :
         {std::pair(true, false), std::pair(false, false),
          std::pair(false, true)}) {
      Ranks ranks(Apart(has_mail, is_broadcast), std::chrono::seconds(20));
      std::vector<Layer> layers;
      for (int r = 0; r < kRanks; ++r) layers.emplace_back(batch, ranks, r);
      /// Of one of calls in a row.
      const auto best_ms = [&](auto run) {
        double best = 1e9;
        for (int round = 0; round < kRounds; ++round) {
          const auto start = Clock::now();
          for (const Status& status : ranks.Run([&](int rank) -> Status {
                 for (int i = 0; i < kCalls; ++i) {
                   TB_RETURN_IF_ERROR(run(ranks.Next(rank), layers[rank]));
                 }
                 return OkStatus();
               })) {
            EXPECT_TRUE(status.ok()) << status;
          }
          const Milliseconds took = Clock::now() - start;
          best = std::min(best, took.count() / kCalls);
        }
        return best;
      };
      const double dispatch =
          best_ms([](const Caller& caller, const Layer& layer) {
            return RunDispatch(caller, layer.Dispatch());
          });
      const double combine =
          best_ms([](const Caller& caller, const Layer& layer) {
            return RunCombine(caller, layer.Combine());
          });
      const double megabytes = static_cast<double>(layers[0].num_sent) *
                               static_cast<double>(layers[0].shape.row_bytes) /
                               1e6;
      std::printf(
          "%d tokens, hidden %d, %d experts, top %d, %s: dispatch %.3f ms "
          "(%.1f GB/s each way), combine %.3f ms (%.1f)\n",
          batch.num_tokens, batch.hidden, batch.num_experts, batch.top_k,
          is_broadcast ? "broadcast"
          : has_mail   ? "auto"
                       : "rings",
          dispatch, megabytes / dispatch, combine, megabytes / combine);
    }
  }
}

/// A layer in chunks, enqueued as `expert_parallel` does (docs/gpu_exchange.md,
/// "Beside the experts").
class Chunked {
 public:
  Chunked(const Batch& batch, int num_chunks, int64_t expert_bytes,
          Ranks& ranks, int rank)
      : rank_(rank), stand_in_(expert_bytes / num_chunks, 0) {
    Batch part = batch;
    part.num_tokens /= num_chunks;
    for (int i = 0; i < num_chunks; ++i)
      chunks_.emplace_back(part, ranks, rank);
    count_scratch_ = DeviceBytes::Scratch(
        ScratchBytes(ranks.CallerOf(rank, 0), Count(1, num_chunks)));
  }

  /// Everything from the first call until the GPU is done; ms.
  StatusOr<double> Run(Ranks& ranks, int64_t run_id, bool is_counted) {
    caller_ = ranks.CallerOf(rank_, 0);
    caller_.key.run_id = run_id;
    caller_.on_step = [this](const char* step) { Add(step); };
    is_counted_ = is_counted;
    num_marks_ = 0;
    const auto start = Clock::now();
    TB_RETURN_IF_ERROR(Mark("BEGIN"));
    const size_t num_chunks = chunks_.size();
    TB_RETURN_IF_ERROR(CountEarly(1, std::min<size_t>(2, num_chunks)));
    TB_RETURN_IF_ERROR(
        RunDispatch(Next(caller_.stream), chunks_[0].Dispatch(is_counted_)));
    TB_RETURN_IF_ERROR(CountEarly(2, num_chunks));
    TB_RETURN_IF_ERROR(Mark("DISPATCHED"));
    for (size_t i = 0; i < num_chunks; ++i) {
      const bool is_last = i + 1 == num_chunks;
      if (!is_last) TB_RETURN_IF_ERROR(StartDispatch(chunks_[i + 1]));
      (void)cudaMemsetAsync(stand_in_.as(), 1, stand_in_.size(),
                            caller_.stream);
      TB_RETURN_IF_ERROR(Mark("EXPERTS"));
      if (i > 0) TB_RETURN_IF_ERROR(Finish(chunks_[i - 1].sums));
      if (is_last) {
        TB_RETURN_IF_ERROR(
            RunCombine(Next(caller_.stream), chunks_[i].Combine(is_counted_)));
        break;
      }
      TB_RETURN_IF_ERROR(StartCombine(chunks_[i]));
      TB_RETURN_IF_ERROR(Finish(chunks_[i + 1].rows));
      TB_RETURN_IF_ERROR(Mark("DISPATCHED"));
    }
    TB_RETURN_IF_ERROR(Mark("END"));
    TB_RETURN_IF_ERROR(
        FromCuda(cudaStreamSynchronize(caller_.stream), "the layer"));
    return Milliseconds(Clock::now() - start).count();
  }

  /// When the host was where in the last run and, where that is in capitals,
  /// the program's stream.
  void Print() const {
    for (size_t i = 0; i < num_marks_; ++i) {
      const OneMark& mark = marks_[i];
      std::printf("  %-12s %7.3f", mark.name,
                  Milliseconds(mark.at - marks_[0].at).count());
      if (mark.is_recorded) {
        float ms = 0;
        (void)cudaEventElapsedTime(&ms, marks_[0].event, mark.event);
        std::printf("  GPU %7.3f", static_cast<double>(ms));
      }
      std::printf("\n");
    }
  }

 private:
  struct OneMark {
    const char* name = nullptr;
    Clock::time_point at;
    cudaEvent_t event = nullptr;
    bool is_recorded = false;
  };
  OneMark& Add(const char* name) {
    if (num_marks_ == marks_.size()) {
      (void)cudaEventCreate(&marks_.emplace_back().event);
    }
    OneMark& mark = marks_[num_marks_++];
    mark = {.name = name, .at = Clock::now(), .event = mark.event};
    return mark;
  }
  Status Mark(const char* name) {
    OneMark& mark = Add(name);
    mark.is_recorded = true;
    return FromCuda(cudaEventRecord(mark.event, caller_.stream), "a mark");
  }
  GpuCount Count(size_t begin, size_t end) const {
    GpuCount call;
    call.shape = chunks_[0].shape;
    for (size_t i = begin; i < end; ++i) {
      call.parts.push_back(
          {chunks_[i].ids.as<int32_t>(), chunks_[i].early.as<int32_t>()});
    }
    return call;
  }
  Status CountEarly(size_t begin, size_t end) {
    GpuCount call = Count(begin, end);
    if (!is_counted_ || call.parts.empty()) return OkStatus();
    call.scratch = count_scratch_.as();
    return RunCount(Next(caller_.stream), call);
  }
  Status StartDispatch(const Layer& chunk) {
    return Beside(chunk.rows, [&](const Caller& caller) {
      return RunDispatch(caller, chunk.Dispatch(is_counted_));
    });
  }
  Status StartCombine(const Layer& chunk) {
    return Beside(chunk.sums, [&](const Caller& caller) {
      return RunCombine(caller, chunk.Combine(is_counted_));
    });
  }
  Caller Next(cudaStream_t stream) {
    Caller caller = caller_;
    ++caller_.key.position;
    caller.stream = stream;
    return caller;
  }
  SideStreams::Program Program() const {
    return {caller_.device, caller_.key.run_id, caller_.stream};
  }
  Status Beside(const DeviceBytes& result,
                const std::function<Status(const Caller&)>& enqueue) {
    return Streams().Run(
        Program(), {result.as()},
        [&](const StatusOr<SideStreams::Lane*>& lane) -> Status {
          TB_RETURN_IF_ERROR(lane.status());
          return enqueue(Next((*lane)->stream()));
        });
  }
  Status Finish(const DeviceBytes& result) {
    return Streams().Join(Program(), {result.as()});
  }
  /// As many lanes for each rank as there are for a device.
  static SideStreams& Streams() {
    static SideStreams streams(2 * kRanks);
    return streams;
  }

  const int rank_;
  const DeviceBytes stand_in_;  // What the experts write.
  std::vector<Layer> chunks_;
  DeviceBytes count_scratch_;
  std::vector<OneMark> marks_;
  size_t num_marks_ = 0;
  Caller caller_;
  bool is_counted_ = false;
};

TEST_F(PackedSpeed, DISABLED_OfLayersInChunks) {
  constexpr int kRounds = 24;
  constexpr int kWarmUp = 4;
  const Batch batch = {4096, 4096, 64, 2};
  int64_t run_id = 100;
  for (const int64_t gib : {0, 4}) {
    for (const int num_chunks : {1, 2, 4}) {
      for (const bool is_counted : {false, true}) {
        Ranks ranks(Apart(false, false), std::chrono::seconds(20));
        std::vector<std::unique_ptr<Chunked>> layers;
        for (int r = 0; r < kRanks; ++r) {
          layers.push_back(std::make_unique<Chunked>(batch, num_chunks,
                                                     gib << 30, ranks, r));
        }
        std::vector<double> times;
        std::barrier all(kRanks);
        for (const Status& status : ranks.Run([&](int rank) -> Status {
               for (int round = 0; round < kRounds; ++round) {
                 all.arrive_and_wait();
                 TB_ASSIGN_OR_RETURN(
                     const double took,
                     layers[rank]->Run(ranks, run_id + round, is_counted));
                 if (rank == 0 && round >= kWarmUp) times.push_back(took);
               }
               return OkStatus();
             })) {
          ASSERT_TRUE(status.ok()) << status;
        }
        run_id += kRounds;
        std::sort(times.begin(), times.end());
        std::printf("experts write %lld GiB, %d chunks, %s: %.3f ms\n",
                    static_cast<long long>(gib), num_chunks,
                    is_counted ? "counted early" : "hosts wait",
                    times[times.size() / 2]);
        layers[0]->Print();
      }
    }
  }
}

}  // namespace
}  // namespace turbobus::moe::cuda

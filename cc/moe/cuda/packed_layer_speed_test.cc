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
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "moe/cuda/events.h"
#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/side_streams.h"

// Where the time of single layers goes, printed for people: dispatch, stand-in
// experts, combine, each layer begun when the one before it was over. Ranks
// that share a GPU share its link: give them half the tokens to compare.

namespace turbobus::moe::cuda {
namespace {

using testing::DeviceBytes;
using testing::OnRanks;
using testing::Ranks;
using testing::ToBytes;
using Clock = std::chrono::steady_clock;

[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

constexpr int kRanks = 2;
constexpr int kRounds = 24;
constexpr int kWarmUp = 4;

struct Batch {
  int num_tokens;
  int hidden;
  int num_experts;
  int top_k;
};

Wiring Rings() {
  Wiring wiring;
  wiring.is_direct = false;
  wiring.most_mailed_bytes = -1;
  for (int r = 0; r < kRanks; ++r) {
    wiring.devices.push_back(testing::DeviceOf(r));
  }
  return wiring;
}

Shape ShapeOf(const Batch& batch, int rank) {
  Shape shape;
  shape.rank = rank;
  shape.num_ranks = kRanks;
  shape.num_tokens = batch.num_tokens;
  shape.top_k = batch.top_k;
  shape.num_experts = batch.num_experts;
  shape.num_local_experts = batch.num_experts / kRanks;
  shape.row_bytes = batch.hidden * 2;
  shape.num_rows = int64_t{batch.num_tokens} * batch.top_k * 5 / 4;
  return shape;
}

/// One rank's layer.
struct Layer {
  Shape shape;
  DeviceBytes tokens, ids, weights, rows, results, sizes, slots, sums;
  DeviceBytes scratch[2];
  cudaEvent_t begin = nullptr, dispatched = nullptr, done = nullptr,
              end = nullptr;

  Layer(const Batch& batch, Ranks& ranks, int rank)
      : shape(ShapeOf(batch, rank)) {
    (void)cudaSetDevice(ranks.devices()[rank]);
    const int64_t choices = int64_t{batch.num_tokens} * batch.top_k;
    std::mt19937 random(rank);
    std::vector<int32_t> chosen(choices);
    for (int32_t& id : chosen) {
      id = static_cast<int32_t>(random() % batch.num_experts);
    }
    ids = DeviceBytes(ToBytes(chosen));
    tokens = DeviceBytes(batch.num_tokens * shape.row_bytes, 1);
    weights = DeviceBytes(ToBytes(std::vector<float>(choices, 0.5f)));
    rows = DeviceBytes(shape.num_rows * shape.row_bytes, 0);
    results = DeviceBytes(shape.num_rows * shape.row_bytes, 0);
    sizes = DeviceBytes(8 * shape.num_local_experts, 0);
    slots = DeviceBytes(4 * choices, 0);
    sums = DeviceBytes(batch.num_tokens * shape.row_bytes, 0);
    const Caller caller = ranks.CallerOf(rank, 0);
    scratch[0] = DeviceBytes::Scratch(ScratchBytes(caller, Dispatch()));
    scratch[1] = DeviceBytes::Scratch(ScratchBytes(caller, Combine()));
    for (cudaEvent_t* event : {&begin, &dispatched, &done, &end}) {
      (void)cudaEventCreate(event);
    }
  }

  GpuDispatch Dispatch() const {
    GpuDispatch call;
    call.shape = shape;
    call.tokens = tokens.as();
    call.expert_ids = ids.as<int32_t>();
    call.rows = rows.as();
    call.group_sizes = sizes.as<int32_t>();
    call.wanted = call.group_sizes + shape.num_local_experts;
    call.slots = slots.as<int32_t>();
    call.scratch = scratch[0].as();
    return call;
  }
  GpuCombine Combine(bool is_counted = true) const {
    GpuCombine call;
    call.shape = shape;
    call.is_counted = is_counted;
    call.dtype = DType::kBF16;
    call.rows = results.as();
    call.expert_ids = ids.as<int32_t>();
    call.slots = slots.as<int32_t>();
    call.weights = weights.as();
    call.sums = sums.as();
    call.scratch = scratch[1].as();
    return call;
  }
};

/// The names of a layer's steps, and when each was over, by round.
class Times {
 public:
  void Begin() {
    start_ = Clock::now();
    next_ = 0;
  }
  void Add(std::string name, double ms) {
    if (next_ == steps_.size()) steps_.push_back({std::move(name), {}});
    steps_[next_++].second.push_back(ms);
  }
  void Add(std::string name) {
    const std::chrono::duration<double, std::milli> since =
        Clock::now() - start_;
    Add(std::move(name), since.count());
  }
  void Print() {
    for (auto& [name, times] : steps_) {
      std::sort(times.begin() + kWarmUp, times.end());
      std::printf("  %-20s %7.3f\n", name.c_str(),
                  times[(times.size() + kWarmUp) / 2]);
    }
  }

 private:
  Clock::time_point start_;
  size_t next_ = 0;
  std::vector<std::pair<std::string, std::vector<double>>> steps_;
};

double Elapsed(cudaEvent_t from, cudaEvent_t to) {
  float ms = 0;
  (void)cudaEventElapsedTime(&ms, from, to);
  return ms;
}

Status RunLayer(Ranks& ranks, Layer& layer, int rank, int round,
                bool is_counted, Times& times) {
  Caller caller = ranks.CallerOf(rank, 2 * round);
  const std::string op[] = {"dispatch ", "combine "};
  int at = 0;
  caller.on_step = [&](const char* step) { times.Add(op[at] + step); };
  times.Begin();
  (void)cudaEventRecord(layer.begin, caller.stream);
  TB_RETURN_IF_ERROR(RunDispatch(caller, layer.Dispatch()));
  times.Add("dispatch returned");
  (void)cudaEventRecord(layer.dispatched, caller.stream);
  (void)cudaMemcpyAsync(layer.results.as(), layer.rows.as(),
                        layer.shape.num_rows * layer.shape.row_bytes,
                        cudaMemcpyDeviceToDevice, caller.stream);
  (void)cudaEventRecord(layer.done, caller.stream);
  at = 1;
  ++caller.key.position;
  TB_RETURN_IF_ERROR(RunCombine(caller, layer.Combine(is_counted)));
  times.Add("combine returned");
  (void)cudaEventRecord(layer.end, caller.stream);
  const cudaError_t error = cudaStreamSynchronize(caller.stream);
  times.Add("end");
  times.Add("GPU: dispatched", Elapsed(layer.begin, layer.dispatched));
  times.Add("GPU: experts done", Elapsed(layer.begin, layer.done));
  times.Add("GPU: end", Elapsed(layer.begin, layer.end));
  return FromCuda(error, "the layer");
}

TEST(PackedLayerSpeed, DISABLED_OfSingleLayers) {
  if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  for (const Batch& batch :
       {Batch{4096, 4096, 64, 2}, Batch{2048, 4096, 64, 2},
        Batch{8192, 2048, 128, 8}, Batch{512, 4096, 64, 2}}) {
    Ranks ranks(Rings(), std::chrono::seconds(20));
    std::vector<Layer> layers;
    for (int r = 0; r < kRanks; ++r) layers.emplace_back(batch, ranks, r);
    int first_round = 0;
    for (const auto& [is_counted, idle] :
         {std::pair(false, 0), std::pair(true, 0), std::pair(true, 5)}) {
      std::vector<Times> times(kRanks);
      std::barrier all(kRanks);
      for (const Status& status :
           OnRanks(ranks.devices(), [&](int rank) -> Status {
             for (int round = 0; round < kRounds; ++round) {
               std::this_thread::sleep_for(std::chrono::milliseconds(idle));
               all.arrive_and_wait();
               TB_RETURN_IF_ERROR(RunLayer(ranks, layers[rank], rank,
                                           first_round + round, is_counted,
                                           times[rank]));
             }
             return OkStatus();
           })) {
        ASSERT_TRUE(status.ok()) << status;
      }
      first_round += kRounds;
      std::printf("%d tokens, hidden %d, %d experts, top %d, %s, %d idle; ms\n",
                  batch.num_tokens, batch.hidden, batch.num_experts,
                  batch.top_k,
                  is_counted ? "known to combine" : "combine waits", idle);
      times[0].Print();
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
    for (int i = 0; i < num_chunks; ++i) {
      chunks_.emplace_back(part, ranks, rank);
      early_.push_back(
          DeviceBytes(int64_t{4} * part.num_tokens * part.top_k, 0));
    }
    count_scratch_ = DeviceBytes::Scratch(
        ScratchBytes(ranks.CallerOf(rank, 0), Count(1, num_chunks)));
  }

  /// Everything from the first call until the GPU is done; ms.
  StatusOr<double> Run(Ranks& ranks, int64_t run_id, bool is_counted) {
    caller_ = ranks.CallerOf(rank_, 0);
    caller_.key.run_id = run_id;
    is_counted_ = is_counted;
    next_mark_ = 0;
    const auto start = Clock::now();
    TB_RETURN_IF_ERROR(Mark("begin"));
    const size_t num_chunks = chunks_.size();
    TB_RETURN_IF_ERROR(CountEarly(1, std::min<size_t>(2, num_chunks)));
    TB_RETURN_IF_ERROR(Mark("counted"));
    TB_RETURN_IF_ERROR(RunDispatch(Next(caller_.stream), DispatchOf(0)));
    TB_RETURN_IF_ERROR(CountEarly(2, num_chunks));
    TB_RETURN_IF_ERROR(Mark("first dispatched"));
    for (size_t i = 0; i < chunks_.size(); ++i) {
      const bool is_last = i + 1 == chunks_.size();
      if (!is_last) TB_RETURN_IF_ERROR(StartDispatch(i + 1));
      (void)cudaMemsetAsync(stand_in_.as(), 1, stand_in_.size(),
                            caller_.stream);
      TB_RETURN_IF_ERROR(Mark("experts"));
      if (i > 0) TB_RETURN_IF_ERROR(Finish(chunks_[i - 1].sums.as()));
      TB_RETURN_IF_ERROR(Mark("combined"));
      if (is_last) {
        TB_RETURN_IF_ERROR(
            RunCombine(Next(caller_.stream), chunks_[i].Combine(is_counted_)));
        break;
      }
      TB_RETURN_IF_ERROR(Beside(chunks_[i].sums.as(), [&](const Caller& call) {
        return RunCombine(call, chunks_[i].Combine(is_counted_));
      }));
      TB_RETURN_IF_ERROR(Finish(chunks_[i + 1].rows.as()));
      TB_RETURN_IF_ERROR(Mark("dispatched"));
    }
    TB_RETURN_IF_ERROR(Mark("end"));
    TB_RETURN_IF_ERROR(
        FromCuda(cudaStreamSynchronize(caller_.stream), "the layer"));
    const std::chrono::duration<double, std::milli> took = Clock::now() - start;
    return took.count();
  }

  /// When the GPU was where in the last run, by the host's clock beside it.
  void Print() const {
    for (size_t i = 0; i < next_mark_; ++i) {
      std::printf("  %-18s %7.3f  enqueued %7.3f\n", marks_[i].name,
                  Elapsed(marks_[0].event, marks_[i].event),
                  std::chrono::duration<double, std::milli>(marks_[i].enqueued -
                                                            marks_[0].enqueued)
                      .count());
    }
  }

 private:
  struct OneMark {
    const char* name;
    cudaEvent_t event;
    Clock::time_point enqueued;
  };
  Status Mark(const char* name) {
    if (next_mark_ == marks_.size()) {
      (void)cudaEventCreate(&marks_.emplace_back().event);
    }
    OneMark& mark = marks_[next_mark_++];
    mark.name = name;
    mark.enqueued = Clock::now();
    return FromCuda(cudaEventRecord(mark.event, caller_.stream), "a mark");
  }
  GpuCount Count(size_t begin, size_t end) const {
    GpuCount call;
    call.shape = chunks_[0].shape;
    for (size_t i = begin; i < end; ++i) {
      call.parts.push_back(
          {chunks_[i].ids.as<int32_t>(), early_[i].as<int32_t>()});
    }
    return call;
  }
  Status CountEarly(size_t begin, size_t end) {
    GpuCount call = Count(begin, end);
    if (!is_counted_ || call.parts.empty()) return OkStatus();
    call.scratch = count_scratch_.as();
    return RunCount(Next(caller_.stream), call);
  }
  GpuDispatch DispatchOf(size_t i) const {
    GpuDispatch call = chunks_[i].Dispatch();
    if (is_counted_) call.early = early_[i].as();
    return call;
  }
  Status StartDispatch(size_t i) {
    return Beside(chunks_[i].rows.as(), [&](const Caller& call) {
      return RunDispatch(call, DispatchOf(i));
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
  Status Beside(const void* result,
                const std::function<Status(const Caller&)>& enqueue) {
    return Streams().Run(
        Program(), {result},
        [&](const StatusOr<SideStreams::Lane*>& lane) -> Status {
          TB_RETURN_IF_ERROR(lane.status());
          return enqueue(Next((*lane)->stream()));
        });
  }
  /// As many lanes for each rank as there are for a device.
  static SideStreams& Streams() {
    static SideStreams streams(2 * kRanks);
    return streams;
  }
  Status Finish(const void* result) {
    return Streams().Join(Program(), {result});
  }

  const int rank_;
  const DeviceBytes stand_in_;  // What the experts write.
  std::vector<Layer> chunks_;
  std::vector<DeviceBytes> early_;
  DeviceBytes count_scratch_;
  std::vector<OneMark> marks_;
  size_t next_mark_ = 0;
  Caller caller_;
  bool is_counted_ = false;
};

TEST(PackedLayerSpeed, DISABLED_OfChunks) {
  if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  const Batch batch = {4096, 4096, 64, 2};
  int64_t run_id = 100;
  for (const int64_t gib : {0, 4}) {
    for (const int num_chunks : {1, 2, 4}) {
      for (const bool is_counted : {false, true}) {
        Ranks ranks(Rings(), std::chrono::seconds(20));
        std::vector<std::unique_ptr<Chunked>> layers;
        for (int r = 0; r < kRanks; ++r) {
          layers.push_back(std::make_unique<Chunked>(batch, num_chunks,
                                                     gib << 30, ranks, r));
        }
        std::vector<double> times;
        std::barrier all(kRanks);
        for (const Status& status :
             OnRanks(ranks.devices(), [&](int rank) -> Status {
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
        if (gib > 0 && is_counted) layers[0]->Print();
      }
    }
  }
}

}  // namespace
}  // namespace turbobus::moe::cuda

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "moe/cuda/events.h"
#include "moe/cuda/exchange_ranks.h"

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
  Caller caller =
      ranks.CallerOf(rank, 2 * (round + (is_counted ? kRounds : 0)));
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

TEST(PackedLayerSpeed, OfSingleLayers) {
  if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  for (const Batch& batch :
       {Batch{4096, 4096, 64, 2}, Batch{2048, 4096, 64, 2},
        Batch{8192, 2048, 128, 8}, Batch{512, 4096, 64, 2}}) {
    Wiring wiring;
    wiring.is_direct = false;
    wiring.most_mailed_bytes = -1;
    for (int r = 0; r < kRanks; ++r) {
      wiring.devices.push_back(testing::DeviceOf(r));
    }
    Ranks ranks(wiring, std::chrono::seconds(20));
    std::vector<Layer> layers;
    for (int r = 0; r < kRanks; ++r) layers.emplace_back(batch, ranks, r);
    for (const bool is_counted : {false, true}) {
      std::vector<Times> times(kRanks);
      std::barrier all(kRanks);
      for (const Status& status :
           OnRanks(ranks.devices(), [&](int rank) -> Status {
             for (int round = 0; round < kRounds; ++round) {
               all.arrive_and_wait();
               TB_RETURN_IF_ERROR(RunLayer(ranks, layers[rank], rank, round,
                                           is_counted, times[rank]));
             }
             return OkStatus();
           })) {
        ASSERT_TRUE(status.ok()) << status;
      }
      std::printf("%d tokens, hidden %d, %d experts, top %d, %s; ms\n",
                  batch.num_tokens, batch.hidden, batch.num_experts,
                  batch.top_k,
                  is_counted ? "known to combine" : "combine waits");
      times[0].Print();
    }
  }
}

}  // namespace
}  // namespace turbobus::moe::cuda

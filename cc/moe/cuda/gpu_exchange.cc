#include "moe/cuda/gpu_exchange.h"

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace turbobus::moe::cuda {
namespace {

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return OkStatus();
  return Internal(std::string(what) + ": " + cudaGetErrorName(error) + " (" +
                  cudaGetErrorString(error) + ")");
}

/// Events that are not in use, by device.
class EventPool {
 public:
  static EventPool& Process() {
    static auto* const pool = new EventPool;
    return *pool;
  }

  /// An event of the current device, which is `device`; it goes back when the
  /// last owner lets go.
  StatusOr<std::shared_ptr<CUevent_st>> Take(int device) {
    {
      const std::lock_guard lock(mutex_);
      if (static_cast<size_t>(device) >= free_.size()) free_.resize(device + 1);
      if (!free_[device].empty()) {
        cudaEvent_t event = free_[device].back();
        free_[device].pop_back();
        return Lend(device, event);
      }
    }
    cudaEvent_t event = nullptr;
    TB_RETURN_IF_ERROR(
        FromCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                 "cudaEventCreate"));
    return Lend(device, event);
  }

 private:
  std::shared_ptr<CUevent_st> Lend(int device, cudaEvent_t event) {
    return {event, [this, device](cudaEvent_t returned) {
              const std::lock_guard lock(mutex_);
              free_[device].push_back(returned);
            }};
  }

  std::mutex mutex_;
  std::vector<std::vector<cudaEvent_t>> free_;
};

/// One rank's way through the meetings of a call.
class Visit {
 public:
  explicit Visit(const Caller& caller) : caller_(caller) {}

  /// Tells the others that all before this is enqueued here, and makes the
  /// stream wait until it is done everywhere. `addresses` are swapped.
  Status Meet(std::vector<const void*> addresses = {}) {
    const Status status = Try(std::move(addresses));
    if (!status.ok()) caller_.meeting->Fail(caller_.key, Who(), status);
    return status;
  }

  /// Address number `index` of every rank.
  template <typename T>
  Peers<T> Addresses(int index) const {
    Peers<T> peers;
    for (int r = 0; r < caller_.num_ranks; ++r) {
      peers.of[r] = reinterpret_cast<T*>((*records_)[r].values[index]);
    }
    return peers;
  }

  /// Passes a launch's error on to the ranks that wait for this one.
  Status Check(cudaError_t error, const char* what) {
    const Status status = FromCuda(error, what);
    if (!status.ok()) caller_.meeting->Fail(caller_.key, Who(), status);
    return status;
  }

 private:
  BlockingMeeting::Rank Who() const {
    return {
        .op = caller_.op, .rank = caller_.rank, .num_ranks = caller_.num_ranks};
  }

  Status Try(std::vector<const void*> addresses) {
    TB_ASSIGN_OR_RETURN(const std::shared_ptr<CUevent_st> event,
                        EventPool::Process().Take(caller_.device));
    TB_RETURN_IF_ERROR(FromCuda(cudaEventRecord(event.get(), caller_.stream),
                                "cudaEventRecord"));
    BlockingMeeting::Record record;
    for (const void* address : addresses) {
      record.values.push_back(reinterpret_cast<uint64_t>(address));
    }
    record.values.push_back(reinterpret_cast<uint64_t>(event.get()));
    record.keep = event;
    TB_ASSIGN_OR_RETURN(
        BlockingMeeting::Records records,
        caller_.meeting->Meet(caller_.key, phase_++, Who(), std::move(record)));
    for (int r = 0; r < caller_.num_ranks; ++r) {
      if (r == caller_.rank) continue;
      auto* const peer_event =
          reinterpret_cast<cudaEvent_t>((*records)[r].values.back());
      TB_RETURN_IF_ERROR(
          FromCuda(cudaStreamWaitEvent(caller_.stream, peer_event, 0),
                   "cudaStreamWaitEvent"));
    }
    if (!addresses.empty()) records_ = std::move(records);
    return OkStatus();
  }

  const Caller& caller_;
  int phase_ = 0;
  BlockingMeeting::Records records_;
};

}  // namespace

Status RunDispatch(const Caller& caller, const GpuDispatch& call) {
  const cudaStream_t stream = caller.stream;
  Visit visit(caller);
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchPlan(call.shape, call.expert_ids, call.counts,
                             call.block_offsets, stream),
                  "plan kernel"));
  TB_RETURN_IF_ERROR(visit.Meet({call.counts, call.rows, call.arrivals}));
  const SendArgs args = {
      .counts = visit.Addresses<const int32_t>(0),
      .arrivals = visit.Addresses<int32_t>(2),
      .rows = visit.Addresses<uint8_t>(1),
      .expert_ids = call.expert_ids,
      .block_offsets = call.block_offsets,
      .tokens = call.tokens,
      .positions = call.slots,
      .group_sizes = call.group_sizes,
      .wanted = call.wanted,
      .is_deduplicated = call.is_deduplicated,
  };
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchSend(call.shape, args, stream), "send kernel"));
  TB_RETURN_IF_ERROR(visit.Meet());
  if (!call.is_deduplicated) return OkStatus();
  return visit.Check(LaunchExpand(call.shape, call.arrivals, call.rows, stream),
                     "expand kernel");
}

Status RunCombine(const Caller& caller, const GpuCombine& call) {
  Visit visit(caller);
  TB_RETURN_IF_ERROR(
      visit.Meet({call.expert_ids, call.slots, call.weights, call.partials}));
  CombineArgs args = {
      .expert_ids = visit.Addresses<const int32_t>(0),
      .positions = visit.Addresses<const int32_t>(1),
      .weights = visit.Addresses<const void>(2),
      .rows = call.rows,
      .partials = visit.Addresses<uint8_t>(3),
      .out = call.sums,
  };
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchPartial(call.shape, call.dtype, args, caller.stream),
                  "partial-sum kernel"));
  TB_RETURN_IF_ERROR(visit.Meet());
  return visit.Check(LaunchSum(call.shape, call.dtype, args, caller.stream),
                     "sum kernel");
}

Status RunCombineGrad(const Caller& caller, const GpuCombineGrad& call) {
  Visit visit(caller);
  TB_RETURN_IF_ERROR(visit.Meet({call.expert_ids, call.slots, call.weights,
                                 call.row_grads, call.weight_grads}));
  const CombineGradArgs args = {
      .expert_ids = visit.Addresses<const int32_t>(0),
      .positions = visit.Addresses<const int32_t>(1),
      .weights = visit.Addresses<const void>(2),
      .out_grad = call.sum_grads,
      .rows = call.rows,
      .row_grads = visit.Addresses<uint8_t>(3),
      .weight_grads = visit.Addresses<void>(4),
      .group_sizes = call.group_sizes,
  };
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchGradSend(call.shape, call.dtype, args, caller.stream),
                  "gradient send kernel"));
  TB_RETURN_IF_ERROR(visit.Meet());
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchGradExpand(call.shape, call.dtype, args, caller.stream),
                  "gradient expand kernel"));
  return visit.Meet();
}

}  // namespace turbobus::moe::cuda

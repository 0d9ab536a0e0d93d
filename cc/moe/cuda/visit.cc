#include "moe/cuda/visit.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

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

}  // namespace

Status Visit::Meet(std::vector<const void*> addresses) {
  return Check(Try(std::move(addresses)));
}

Status Visit::Check(cudaError_t error, const char* what) {
  return Check(FromCuda(error, what));
}

Status Visit::Check(const Status& status) {
  if (!status.ok()) caller_.meeting->Fail(caller_.key, Who(), status);
  return status;
}

BlockingMeeting::Rank Visit::Who() const {
  return {
      .op = caller_.op, .rank = caller_.rank, .num_ranks = caller_.num_ranks};
}

Status Visit::Try(std::vector<const void*> addresses) {
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

}  // namespace turbobus::moe::cuda

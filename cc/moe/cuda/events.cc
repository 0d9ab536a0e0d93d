#include "moe/cuda/events.h"

#include <string>

namespace turbobus::moe::cuda {

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return OkStatus();
  return Internal(std::string(what) + ": " + cudaGetErrorName(error) + " (" +
                  cudaGetErrorString(error) + ")");
}

EventPool& EventPool::Process() {
  static auto* const pool = new EventPool;
  return *pool;
}

StatusOr<SharedEvent> EventPool::Take(int device) {
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
  ++num_made_;
  return Lend(device, event);
}

StatusOr<SharedEvent> EventPool::Record(int device, cudaStream_t stream) {
  TB_ASSIGN_OR_RETURN(SharedEvent event, Take(device));
  TB_RETURN_IF_ERROR(
      FromCuda(cudaEventRecord(event.get(), stream), "cudaEventRecord"));
  return event;
}

SharedEvent EventPool::Lend(int device, cudaEvent_t event) {
  return {event, [this, device](cudaEvent_t returned) {
            const std::lock_guard lock(mutex_);
            free_[device].push_back(returned);
          }};
}

}  // namespace turbobus::moe::cuda

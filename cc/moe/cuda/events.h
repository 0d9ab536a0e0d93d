#ifndef TURBOBUS_MOE_CUDA_EVENTS_H_
#define TURBOBUS_MOE_CUDA_EVENTS_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"

namespace turbobus::moe::cuda {

/// `error` with CUDA's own words and `what` was tried.
Status FromCuda(cudaError_t error, const char* what);

/// An event; the last owner gives it back to its pool.
using SharedEvent = std::shared_ptr<CUevent_st>;

/// Events that are not in use, by device. Thread-safe; never destroyed, since
/// what uses it may outlive static objects.
class EventPool {
 public:
  static EventPool& Process();

  /// An event of the current device, which is `device`.
  StatusOr<SharedEvent> Take(int device);

  /// The same, recorded on `stream`.
  StatusOr<SharedEvent> Record(int device, cudaStream_t stream);

  /// Events that there are, in use or not.
  int64_t num_made() const { return num_made_; }

 private:
  SharedEvent Lend(int device, cudaEvent_t event);

  std::atomic<int64_t> num_made_ = 0;
  std::mutex mutex_;
  std::vector<std::vector<cudaEvent_t>> free_;  // Guarded by `mutex_`.
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_EVENTS_H_

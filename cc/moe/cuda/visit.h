#ifndef TURBOBUS_MOE_CUDA_VISIT_H_
#define TURBOBUS_MOE_CUDA_VISIT_H_

#include <cuda_runtime_api.h>

#include <vector>

#include "base/status.h"
#include "moe/blocking_meeting.h"
#include "moe/cuda/gpu_exchange.h"
#include "moe/cuda/kernels.h"

namespace turbobus::moe::cuda {

/// One rank's way through the meetings of a call. For one host thread, with the
/// caller's device current; `caller` must outlive it. Whatever fails here fails
/// the other ranks of the call too.
class Visit {
 public:
  explicit Visit(const Caller& caller) : caller_(caller) {}

  /// Tells the others that all before this is enqueued here, and makes the
  /// stream wait until it is done everywhere. `addresses` are swapped. Blocks
  /// until all ranks have come, or its time is over.
  Status Meet(std::vector<const void*> addresses = {});

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
  Status Check(cudaError_t error, const char* what);

  /// The same for any other reason not to go on.
  Status Check(const Status& status);

 private:
  BlockingMeeting::Rank Who() const;
  Status Try(std::vector<const void*> addresses);

  const Caller& caller_;
  int phase_ = 0;
  BlockingMeeting::Records records_;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_VISIT_H_

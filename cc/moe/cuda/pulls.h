#ifndef TURBOBUS_MOE_CUDA_PULLS_H_
#define TURBOBUS_MOE_CUDA_PULLS_H_

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "moe/cuda/gpu_exchange.h"
#include "moe/cuda/transfer.h"
#include "moe/cuda/visit.h"

namespace turbobus::moe::cuda {

/// What one rank of a call takes out of the peers' memory by rings. For one
/// host thread. Whatever is enqueued is over before the caller's stream passes
/// the call; `caller` and `visit` must outlive it.
class Pulls {
 public:
  Pulls(const Caller& caller, Visit& visit) : caller_(caller), visit_(visit) {}
  /// After an error what was pulled may still be on its way: the caller's
  /// stream waits for it.
  ~Pulls() { (void)Await(); }
  Pulls(const Pulls&) = delete;
  Pulls& operator=(const Pulls&) = delete;

  /// Bytes to take from a peer, after what either has recorded for the last
  /// meeting that swapped values.
  Status Add(int peer, const uint8_t* from, uint8_t* to, int64_t size_bytes);
  /// Enqueues all of them.
  Status Start();
  /// Makes the caller's stream wait for them.
  Status Await();
  /// Meets; then nobody reads this rank's memory any more.
  Status End();

 private:
  const Caller& caller_;
  Visit& visit_;
  std::vector<Transfer> transfers_;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_PULLS_H_

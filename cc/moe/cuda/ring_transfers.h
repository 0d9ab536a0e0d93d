#ifndef TURBOBUS_MOE_CUDA_RING_TRANSFERS_H_
#define TURBOBUS_MOE_CUDA_RING_TRANSFERS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "moe/cuda/gpu_exchange.h"
#include "moe/cuda/transfer.h"
#include "moe/cuda/visit.h"

namespace turbobus::moe::cuda {

/// What one rank of a call moves by rings: rows that it takes out of the peers'
/// memory, or its own into all of theirs. For one host thread. Whatever is
/// enqueued is over before the caller's stream passes the call; `caller` and
/// `visit` must outlive it.
class RingTransfers {
 public:
  RingTransfers(const Caller& caller, Visit& visit)
      : caller_(caller), visit_(visit) {}
  /// After an error what was enqueued may still be on its way: the caller's
  /// stream waits for it.
  ~RingTransfers() { Drain(); }
  RingTransfers(const RingTransfers&) = delete;
  RingTransfers& operator=(const RingTransfers&) = delete;

  /// Rows to take from a peer.
  struct Pull {
    int peer = 0;
    const uint8_t* from = nullptr;
    uint8_t* to = nullptr;
    int64_t num_rows = 0;
    int64_t row_bytes = 0;
  };

  /// Of n events in `ready`, the i-th is behind the i-th n-th of the rows;
  /// `to` may be written after `begun`.
  Status Add(const Pull& pull, std::span<const cudaEvent_t> ready,
             cudaEvent_t begun);
  /// Enqueues all of them, in up to `most_parts` parts of `least_bytes` at
  /// least, which can be awaited one by one.
  Status Start(int64_t most_parts = 1, int64_t least_bytes = 1);

  /// Enqueues this rank's bytes, by themselves, into every peer's memory: `to`
  /// by rank. The caller's stream waits until they are read.
  Status Push(const uint8_t* from, int64_t size_bytes,
              const std::vector<uint8_t*>& to);

  int num_parts() const { return num_parts_; }
  std::span<const Transfer> transfers() const { return transfers_; }

  /// Make the caller's stream wait for one part of all, or for all.
  Status AwaitPart(int part);
  Status Await();

  /// Meets; then nobody uses this rank's memory any more, and the caller's
  /// stream has what was pushed here.
  Status End();

 private:
  Status Wait(cudaEvent_t event);
  void Drain();

  const Caller& caller_;
  Visit& visit_;
  std::vector<Transfer> transfers_;
  std::vector<int> readers_;  // Ranks that a push goes to.
  int num_parts_ = 1;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RING_TRANSFERS_H_

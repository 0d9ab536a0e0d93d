#ifndef TURBOBUS_MOE_CUDA_TRANSFER_H_
#define TURBOBUS_MOE_CUDA_TRANSFER_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "moe/cuda/events.h"
#include "moe/cuda/ring.h"

namespace turbobus::moe::cuda {

/// Bytes from one GPU's memory to the same bytes in the memory of others.
struct Transfer {
  int peer = 0;  // Whom it comes from, or 0: for the caller.
  const uint8_t* from = nullptr;
  std::vector<uint8_t*> to;  // By reader.
  int64_t size_bytes = 0;
  RingPool::Lease ring;

  int num_parts = 1;

  /// From byte `begin` on there is nothing to read before `ready`. In order.
  struct Gate {
    int64_t begin = 0;
    cudaEvent_t ready = nullptr;
  };
  std::vector<Gate> gates;

  // Set by `Enqueue`:
  /// After it nothing is read any more.
  SharedEvent sent;
  /// After it reader i has everything.
  std::vector<SharedEvent> received;
  /// After each event the first reader has the bytes up to `end`; the last
  /// part's is all.
  struct Part {
    int64_t end = 0;
    SharedEvent event;
  };
  std::vector<Part> parts;
};

/// The bytes of the next block, `done` of `total` having been copied. A message
/// begins and ends with small blocks: until the first is through the receiving
/// engine has nothing to do, and behind the last the sending one.
int64_t NextBlockBytes(int64_t done, int64_t total, int64_t most);

/// Enqueues all transfers block by block in turn, so that all paths are busy at
/// once. If that fails, the events of what was enqueued are set all the same.
Status Enqueue(std::span<Transfer> transfers);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_TRANSFER_H_

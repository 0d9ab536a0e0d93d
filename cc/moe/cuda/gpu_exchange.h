#ifndef TURBOBUS_MOE_CUDA_GPU_EXCHANGE_H_
#define TURBOBUS_MOE_CUDA_GPU_EXCHANGE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "moe/blocking_meeting.h"
#include "moe/cuda/kernels.h"
#include "moe/cuda/wiring.h"

// The exchanges of one rank on one GPU (docs/gpu_exchange.md): kernels on the
// caller's stream, between meetings with the other ranks' host threads. Each
// call enqueues and returns; it blocks only while it meets. All memory belongs
// to the caller and must stay valid until `stream` has passed the call.

namespace turbobus::moe::cuda {

/// Who calls, where, and how the ranks of the call find each other.
struct Caller {
  std::string op;
  int device = 0;
  int rank = 0;
  int num_ranks = 1;
  CallKey key;
  int batch = 0;  // Calls of one exchange that only differ in this count once.
  cudaStream_t stream = nullptr;
  BlockingMeeting* meeting = nullptr;
  Wiring wiring;
  /// For measurements: called behind each step of the host's, if it is there.
  std::function<void(const char* step)> on_step = nullptr;
};

struct GpuDispatch {
  Shape shape;
  bool is_deduplicated = true;
  const uint8_t* tokens = nullptr;
  const int32_t* expert_ids = nullptr;
  uint8_t* rows = nullptr;
  int32_t* group_sizes = nullptr;
  int32_t* wanted = nullptr;
  int32_t* slots = nullptr;
  /// What a `GpuCount` of this run by the same ids has written, or null.
  const void* early = nullptr;
  void* scratch = nullptr;  // As much as `ScratchBytes` says.
};

/// Counts the rows of dispatches to come, so that their hosts need not wait
/// for it: behind other work of the stream that would take long.
struct GpuCount {
  struct Part {
    const int32_t* expert_ids = nullptr;
    int32_t* slots = nullptr;  // As the dispatch's; its address is its name.
  };
  Shape shape;  // Of each dispatch.
  std::vector<Part> parts;
  void* scratch = nullptr;
};

struct GpuCombine {
  Shape shape;
  /// Whether `slots` are known to be what a dispatch of this run by the same
  /// ids returned, or a combine's gradient has read: then the host need not
  /// wait until the GPU has counted rows.
  bool is_counted = false;
  DType dtype = DType::kF32;
  const uint8_t* rows = nullptr;
  const int32_t* expert_ids = nullptr;
  const int32_t* slots = nullptr;
  bool has_weights = true;  // Else: the transpose of dispatch.
  const void* weights = nullptr;
  uint8_t* sums = nullptr;
  void* scratch = nullptr;
};

struct GpuCombineGrad {
  Shape shape;
  bool is_counted = false;  // As in `GpuCombine`.
  DType dtype = DType::kF32;
  const uint8_t* sum_grads = nullptr;
  const uint8_t* rows = nullptr;
  const int32_t* expert_ids = nullptr;
  const int32_t* slots = nullptr;
  const void* weights = nullptr;
  const int32_t* group_sizes = nullptr;
  uint8_t* row_grads = nullptr;
  void* weight_grads = nullptr;
  void* scratch = nullptr;
};

/// Bytes of `call.scratch`; pointers need not be set yet.
int64_t ScratchBytes(const Caller& caller, const GpuDispatch& call);
int64_t ScratchBytes(const Caller& caller, const GpuCount& call);
int64_t ScratchBytes(const Caller& caller, const GpuCombine& call);
int64_t ScratchBytes(const Caller& caller, const GpuCombineGrad& call);

// Straight into the peers' memory where the wiring is direct, else through
// pinned host memory. DEADLINE_EXCEEDED if a rank does not come; INTERNAL with
// CUDA's own words if an enqueue fails, on all ranks of the call.
Status RunDispatch(const Caller& caller, const GpuDispatch& call);
/// Does nothing, `slots` included, where no host waits for a count.
Status RunCount(const Caller& caller, const GpuCount& call);
Status RunCombine(const Caller& caller, const GpuCombine& call);
Status RunCombineGrad(const Caller& caller, const GpuCombineGrad& call);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_GPU_EXCHANGE_H_

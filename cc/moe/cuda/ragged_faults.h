#ifndef TURBOBUS_MOE_CUDA_RAGGED_FAULTS_H_
#define TURBOBUS_MOE_CUDA_RAGGED_FAULTS_H_

#include <cstdint>
#include <mutex>

#include "base/status.h"
#include "moe/cuda/ragged.h"

namespace turbobus::moe::cuda {

/// What kernels tell of slices that did not fit. The host does not wait for
/// them, so a later call says it. Thread-safe; blocks for a moment when first
/// used.
class RaggedFaults {
 public:
  static RaggedFaults& Process();

  /// For a call that begins now on `device`. INVALID_ARGUMENT, naming rank and
  /// slice, once for all calls that began before: who has been told of one bad
  /// table is not told again of what was under way by then.
  StatusOr<RaggedReport> Begin(int device);

 private:
  static constexpr int kMaxDevices = 64;

  RaggedFaults();

  std::mutex mutex_;
  RaggedFault* faults_ = nullptr;  // Pinned, [kMaxDevices]; null: no memory.
  int64_t next_serial_ = 1;
  int64_t told_before_ = 0;  // Faults of calls before this one are known.
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RAGGED_FAULTS_H_

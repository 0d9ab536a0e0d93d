#ifndef TURBOBUS_MOE_CUDA_TOTAL_FAULTS_H_
#define TURBOBUS_MOE_CUDA_TOTAL_FAULTS_H_

#include "base/status.h"
#include "moe/cuda/kernels.h"

namespace turbobus::moe::cuda {

/// Where kernels say that the host was told of other numbers of rows
/// (`KnownTotals`) than there are: it cannot happen as far as we know, and must
/// not pass unseen. Thread-safe; blocks for a moment when first used.
class TotalFaults {
 public:
  static TotalFaults& Process();

  /// For a kernel of `device`; null if no memory could be pinned.
  TotalFault* Of(int device) const;

  /// INTERNAL, once, if a kernel of `device` has found something.
  Status Take(int device);

 private:
  static constexpr int kMaxDevices = 64;

  TotalFaults();

  TotalFault* faults_ = nullptr;  // Pinned, [kMaxDevices].
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_TOTAL_FAULTS_H_

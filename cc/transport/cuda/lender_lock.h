#ifndef TURBOBUS_TRANSPORT_CUDA_LENDER_LOCK_H_
#define TURBOBUS_TRANSPORT_CUDA_LENDER_LOCK_H_

#include <memory>
#include <string>

#include "base/status.h"

namespace turbobus::transport::cuda {

/// Held by the one process of this machine that lends a GPU's link.
///
/// A `flock` on a file named after the GPU in JAX_TURBOBUS_LOCK_DIR (default
/// /tmp), so it goes when the process does, however that ends.
class LenderLock {
 public:
  /// UNAVAILABLE if another process holds it or the file cannot be opened.
  static StatusOr<std::unique_ptr<LenderLock>> Take(const std::string& uuid);
  ~LenderLock();
  LenderLock(const LenderLock&) = delete;
  LenderLock& operator=(const LenderLock&) = delete;

 private:
  explicit LenderLock(int fd) : fd_(fd) {}

  const int fd_;
};

}  // namespace turbobus::transport::cuda

#endif  // TURBOBUS_TRANSPORT_CUDA_LENDER_LOCK_H_

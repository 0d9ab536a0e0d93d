#ifndef TURBOBUS_TRANSPORT_CUDA_DEVICE_GUARD_H_
#define TURBOBUS_TRANSPORT_CUDA_DEVICE_GUARD_H_

#include <cuda_runtime_api.h>

namespace turbobus::transport::cuda {

/// Leaves the thread's current device as it was. XLA expects that of a handler.
class DeviceGuard {
 public:
  DeviceGuard() { is_known_ = cudaGetDevice(&device_) == cudaSuccess; }
  ~DeviceGuard() {
    if (is_known_) (void)cudaSetDevice(device_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_ = 0;
  bool is_known_ = false;
};

}  // namespace turbobus::transport::cuda

#endif  // TURBOBUS_TRANSPORT_CUDA_DEVICE_GUARD_H_

#include "transport/cuda/process_peer_access.h"

#include <cuda_runtime_api.h>

#include <string>

#include "base/environment.h"
#include "transport/cuda/cuda_status.h"
#include "transport/cuda/device_guard.h"

namespace turbobus::transport::cuda {
namespace {

Status Enable(int from, int to) {
  const DeviceGuard guard;
  int can_access = 0;
  TB_CUDA_RETURN_IF_ERROR(cudaDeviceCanAccessPeer(&can_access, from, to));
  if (can_access == 0) return Unavailable("CUDA offers no peer access");
  TB_CUDA_RETURN_IF_ERROR(cudaSetDevice(from));
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();  // XLA does it too.
    return OkStatus();
  }
  return ToStatus(error, "cudaDeviceEnablePeerAccess");
}

std::string WhyForbidden() {
  if (IsSwitchedOff("JAX_TURBOBUS_PEER_ACCESS")) {
    return "JAX_TURBOBUS_PEER_ACCESS=" +
           EnvironmentText("JAX_TURBOBUS_PEER_ACCESS");
  }
  constexpr const char* kAllocator = "XLA_PYTHON_CLIENT_ALLOCATOR";
  if (EnvironmentWord(kAllocator) == "cuda_async") {
    return std::string("memory of ") + kAllocator +
           "=cuda_async is closed to peers";
  }
  return "";
}

}  // namespace

PeerAccess& ProcessPeerAccess() {
  static auto* const access = new PeerAccess(Enable, WhyForbidden());
  return *access;
}

}  // namespace turbobus::transport::cuda

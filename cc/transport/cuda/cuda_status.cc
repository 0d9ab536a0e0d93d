#include "transport/cuda/cuda_status.h"

#include <string>

namespace turbobus::transport::cuda {

Status ToStatus(cudaError_t error, const char* expression) {
  if (error == cudaSuccess) return OkStatus();
  (void)cudaGetLastError();
  std::string message = std::string(expression) + ": " +
                        cudaGetErrorName(error) + ": " +
                        cudaGetErrorString(error);
  switch (error) {
    case cudaErrorMemoryAllocation:
      return ResourceExhausted(std::move(message));
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorPeerAccessUnsupported:
      return Unavailable(std::move(message));
    default:
      return Internal(std::move(message));
  }
}

}  // namespace turbobus::transport::cuda

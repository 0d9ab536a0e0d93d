#ifndef TURBOBUS_TRANSPORT_CUDA_CUDA_STATUS_H_
#define TURBOBUS_TRANSPORT_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "base/status.h"

namespace turbobus::transport::cuda {

/// `error` of the call `expression` as a status. Clears the runtime's memory of
/// it, so that no later call reports it again.
Status ToStatus(cudaError_t error, const char* expression);

}  // namespace turbobus::transport::cuda

#define TB_CUDA_RETURN_IF_ERROR(expr)                                   \
  do {                                                                  \
    if (const cudaError_t tb_error = (expr); tb_error != cudaSuccess) { \
      return ::turbobus::transport::cuda::ToStatus(tb_error, #expr);    \
    }                                                                   \
  } while (false)

#endif  // TURBOBUS_TRANSPORT_CUDA_CUDA_STATUS_H_

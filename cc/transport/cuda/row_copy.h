#ifndef TURBOBUS_TRANSPORT_CUDA_ROW_COPY_H_
#define TURBOBUS_TRANSPORT_CUDA_ROW_COPY_H_

#include <cuda_runtime_api.h>

#include "transport/streams.h"

namespace turbobus::transport::cuda {

/// Launches the kernel that copies a row whose index the device knows, on the
/// current device. All pointers must be reachable by its cores.
cudaError_t LaunchRowCopy(const RowCopy& copy, cudaStream_t stream);

/// Launches a kernel that does nothing: the dearer way to yield.
cudaError_t LaunchNothing(cudaStream_t stream);

/// Loads both kernels on the current device. Loading may wait for the device,
/// which a handler must not.
cudaError_t LoadKernels();

}  // namespace turbobus::transport::cuda

#endif  // TURBOBUS_TRANSPORT_CUDA_ROW_COPY_H_

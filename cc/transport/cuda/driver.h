#ifndef TURBOBUS_TRANSPORT_CUDA_DRIVER_H_
#define TURBOBUS_TRANSPORT_CUDA_DRIVER_H_

#include <cuda.h>

#include "base/status.h"

namespace turbobus::transport::cuda {

/// The driver's functions that the runtime does not offer, found when they are
/// first asked for: this library is not linked with the driver.
struct Driver {
  CUresult (*stream_batch_mem_op)(CUstream, unsigned, CUstreamBatchMemOpParams*,
                                  unsigned) = nullptr;
  CUresult (*pointer_get_attribute)(void*, CUpointer_attribute,
                                    CUdeviceptr) = nullptr;
  CUresult (*mem_get_access)(unsigned long long*, const CUmemLocation*,
                             CUdeviceptr) = nullptr;

  /// Functions that this driver lacks are null.
  static const Driver& Get();
};

}  // namespace turbobus::transport::cuda

#endif  // TURBOBUS_TRANSPORT_CUDA_DRIVER_H_

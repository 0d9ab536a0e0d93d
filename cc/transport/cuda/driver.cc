#include "transport/cuda/driver.h"

#include <cuda_runtime_api.h>

namespace turbobus::transport::cuda {
namespace {

template <typename Function>
void Find(const char* name, Function*& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) (void)cudaGetLastError();
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) {
    function = reinterpret_cast<Function*>(found);
  }
}

Driver FindAll() {
  Driver driver;
  Find("cuStreamBatchMemOp", driver.stream_batch_mem_op);
  Find("cuPointerGetAttribute", driver.pointer_get_attribute);
  Find("cuMemGetAccess", driver.mem_get_access);
  return driver;
}

}  // namespace

const Driver& Driver::Get() {
  static const Driver driver = FindAll();
  return driver;
}

}  // namespace turbobus::transport::cuda

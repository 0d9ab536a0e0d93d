#include "transport/cuda/peer_memory.h"

#include <cuda_runtime_api.h>

#include <string>

#include "transport/cuda/cuda_status.h"
#include "transport/cuda/device_guard.h"
#include "transport/cuda/driver.h"

namespace turbobus::transport::cuda {

Status AskForPeerMemory(int gpu, const void* address) {
  const DeviceGuard guard;
  TB_CUDA_RETURN_IF_ERROR(cudaSetDevice(gpu));
  const Driver& driver = Driver::Get();
  const auto at = reinterpret_cast<CUdeviceptr>(address);
  unsigned flags = 0;
  if (driver.pointer_get_attribute != nullptr &&
      driver.pointer_get_attribute(&flags, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
                                   at) == CUDA_SUCCESS &&
      flags == CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE) {
    return OkStatus();
  }
  const CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE,
                                  .id = gpu};
  unsigned long long access = 0;
  if (driver.mem_get_access != nullptr &&
      driver.mem_get_access(&access, &location, at) == CUDA_SUCCESS &&
      access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return OkStatus();
  }
  return Unavailable("GPU " + std::to_string(gpu) +
                     " cannot reach this memory: its allocator gives peers no "
                     "access");
}

Status CheckPeerMemory(std::span<const int> gpus, const void* address) {
  thread_local KnownMemory known;
  uint64_t bits = 0;
  for (const int gpu : gpus) bits |= uint64_t{1} << (gpu % 64);
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (known.Has(at, bits)) return OkStatus();
  for (const int gpu : gpus) {
    TB_RETURN_IF_ERROR(AskForPeerMemory(gpu, address));
  }
  CUdeviceptr begin = 0;
  size_t size_bytes = 0;
  const auto get = Driver::Get().pointer_get_attribute;
  const bool is_known = get != nullptr &&
                        get(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                            static_cast<CUdeviceptr>(at)) == CUDA_SUCCESS &&
                        get(&size_bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                            static_cast<CUdeviceptr>(at)) == CUDA_SUCCESS;
  if (is_known) {
    known.Add(static_cast<uintptr_t>(begin), size_bytes, bits);
  } else {
    known.Add(at, 1, bits);
  }
  return OkStatus();
}

}  // namespace turbobus::transport::cuda

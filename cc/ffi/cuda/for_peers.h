#ifndef TURBOBUS_FFI_CUDA_FOR_PEERS_H_
#define TURBOBUS_FFI_CUDA_FOR_PEERS_H_

#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "ffi/cuda/moe_calls.h"
#include "moe/cuda/gpu_exchange.h"

// What the kernels of a call's other ranks touch of this rank's memory, where
// the wiring is direct: that they may is made sure of before the ranks meet. A
// kernel that touches what is closed to it would end the process.

namespace turbobus::ffi {

/// Bytes on a device.
struct DeviceBytes {
  uint8_t* data = nullptr;
  int64_t size_bytes = 0;
};

/// The buffer's bytes, where the others can read them: a copy of those that lie
/// where they cannot. Constants of a program do. UNAVAILABLE, naming it, if a
/// copy would lie there, too.
StatusOr<DeviceBytes> ReadableByPeers(const GpuContext& context,
                                      const moe::cuda::Caller& caller,
                                      const AnyBuffer& buffer,
                                      std::string_view name);

/// OK if the others can write into the buffer; UNAVAILABLE, naming it, if not.
Status CheckWritableByPeers(const moe::cuda::Caller& caller,
                            const AnyBuffer& buffer, std::string_view name);

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_CUDA_FOR_PEERS_H_

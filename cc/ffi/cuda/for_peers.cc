#include "ffi/cuda/for_peers.h"

#include <cuda_runtime_api.h>

#include <string>

#include "moe/cuda/events.h"
#include "transport/cuda/peer_memory.h"

namespace turbobus::ffi {
namespace {

using moe::cuda::Caller;

/// OK if the GPUs of all ranks reach `address`, if any but the caller's has to.
Status Check(const Caller& caller, const void* address) {
  if (!caller.wiring.is_direct || caller.num_ranks == 1 || address == nullptr) {
    return OkStatus();
  }
  return transport::cuda::CheckPeerMemory(caller.wiring.devices, address);
}

Status Named(const Status& status, std::string_view name) {
  if (status.ok()) return status;
  return Unavailable(
      std::string(name) + ": " + status.message() +
      "; set JAX_TURBOBUS_PEER_ACCESS=0 to exchange through host "
      "memory, or leave XLA its own allocator");
}

}  // namespace

StatusOr<DeviceBytes> ReadableByPeers(const GpuContext& context,
                                      const Caller& caller,
                                      const AnyBuffer& buffer,
                                      std::string_view name) {
  const DeviceBytes own = {static_cast<uint8_t*>(buffer.untyped_data()),
                           static_cast<int64_t>(buffer.size_bytes())};
  if (own.size_bytes == 0 || Check(caller, own.data).ok()) return own;
  TB_ASSIGN_OR_RETURN(void* const copy, context.allocate(own.size_bytes));
  TB_RETURN_IF_ERROR(Named(Check(caller, copy), name));
  TB_RETURN_IF_ERROR(moe::cuda::FromCuda(
      cudaMemcpyAsync(copy, own.data, static_cast<size_t>(own.size_bytes),
                      cudaMemcpyDeviceToDevice, context.stream),
      "copy for peers"));
  return DeviceBytes{static_cast<uint8_t*>(copy), own.size_bytes};
}

Status CheckWritableByPeers(const Caller& caller, const AnyBuffer& buffer,
                            std::string_view name) {
  if (buffer.size_bytes() == 0) return OkStatus();
  return Named(Check(caller, buffer.untyped_data()), name);
}

}  // namespace turbobus::ffi

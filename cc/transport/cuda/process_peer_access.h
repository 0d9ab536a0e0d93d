#ifndef TURBOBUS_TRANSPORT_CUDA_PROCESS_PEER_ACCESS_H_
#define TURBOBUS_TRANSPORT_CUDA_PROCESS_PEER_ACCESS_H_

#include "transport/peer_access.h"

namespace turbobus::transport::cuda {

/// Which of this process's GPUs, by CUDA ordinal, reach each other's memory.
/// None do if JAX_TURBOBUS_PEER_ACCESS is 0, or if XLA takes its memory from
/// CUDA's pools (XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async), which let no peer in.
///
/// Whoever reaches a GPU reaches all that `cudaMalloc` gives out there; of
/// other memory see `CheckPeerMemory`.
PeerAccess& ProcessPeerAccess();

}  // namespace turbobus::transport::cuda

#endif  // TURBOBUS_TRANSPORT_CUDA_PROCESS_PEER_ACCESS_H_

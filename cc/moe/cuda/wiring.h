#ifndef TURBOBUS_MOE_CUDA_WIRING_H_
#define TURBOBUS_MOE_CUDA_WIRING_H_

#include <cstdint>
#include <vector>

#include "moe/traffic.h"
#include "transport/cuda/process_peer_access.h"
#include "transport/peer_access.h"

namespace turbobus::moe::cuda {

/// How bytes get from one GPU to another.
struct Path {
  enum class Kind {
    kPeer,   // Straight into the other's memory.
    kHost,   // Through pinned host memory.
    kRelay,  // Through the memory of a third GPU, which both reach.
  };
  Kind kind = Kind::kHost;
  int relay = -1;  // CUDA ordinal, of kRelay.

  friend bool operator==(const Path&, const Path&) = default;
};

/// Kernels reach host memory at 25-50 GB/s, copy engines at 45, but only after
/// another meeting and a wait of the host: a dispatch of 1 MiB takes 0.08 ms by
/// mail and 0.14 by rings (2 x H200, driver 580.159.04, 2026-11-30,
/// moe_cuda_packed_speed_test). Where they are even is not measured yet; that
/// test prints both up to 4 MiB.
inline constexpr int64_t kMostMailedBytes = 1 << 20;

/// What connects the ranks of a call. The same on all of them.
struct Wiring {
  std::vector<int> devices;  // CUDA ordinals, by rank.
  /// Every rank's kernels write into every other rank's memory: no boxes.
  bool is_direct = true;
  /// Without that: a dispatch puts every token into host memory once, for all.
  bool is_broadcast = false;
  /// Bytes of rows that a rank may have for a peer up to which they go by mail
  /// (packed_exchange.h).
  int64_t most_mailed_bytes = kMostMailedBytes;
  /// Whether a third GPU may carry what host memory otherwise would.
  bool has_relays = false;
  /// Which GPUs reach each other. Not owned.
  transport::PeerAccess* access = &transport::cuda::ProcessPeerAccess();

  /// Of `devices` under a schedule.
  static Wiring Of(
      std::vector<int> devices, Schedule schedule,
      transport::PeerAccess* access = &transport::cuda::ProcessPeerAccess());

  Path Between(int from_rank, int to_rank) const;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_WIRING_H_

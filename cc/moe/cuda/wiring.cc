#include "moe/cuda/wiring.h"

#include <cuda_runtime_api.h>

#include <utility>

namespace turbobus::moe::cuda {
namespace {

int NumDevices() {
  static const int count = [] {
    int found = 0;
    return cudaGetDeviceCount(&found) == cudaSuccess ? found : 0;
  }();
  return count;
}

bool ReachEachOther(transport::PeerAccess& access, int a, int b) {
  return access.Has(a, b) && access.Has(b, a);
}

}  // namespace

Wiring Wiring::Of(std::vector<int> devices, Schedule schedule,
                  transport::PeerAccess* access) {
  Wiring wiring;
  wiring.access = access;
  for (const int from : devices) {
    for (const int to : devices) {
      // All are asked, so that each is let in that can be.
      if (!access->Has(from, to)) wiring.is_direct = false;
    }
  }
  wiring.devices = std::move(devices);
  wiring.is_broadcast = schedule == Schedule::kBroadcast;
  wiring.has_relays = schedule == Schedule::kRelay;
  return wiring;
}

Path Wiring::Between(int from_rank, int to_rank) const {
  const int from = devices[from_rank];
  const int to = devices[to_rank];
  // Ranks that share a GPU do so in tests of what GPUs do that share nothing.
  if (from == to) return {};
  if (ReachEachOther(*access, from, to)) return {.kind = Path::Kind::kPeer};
  if (!has_relays) return {};
  for (int relay = 0; relay < NumDevices(); ++relay) {
    if (relay != from && relay != to && ReachEachOther(*access, relay, from) &&
        ReachEachOther(*access, relay, to)) {
      return {.kind = Path::Kind::kRelay, .relay = relay};
    }
  }
  return {};
}

}  // namespace turbobus::moe::cuda

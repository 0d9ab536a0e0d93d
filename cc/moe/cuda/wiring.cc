#include "moe/cuda/wiring.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "base/environment.h"

namespace turbobus::moe::cuda {
namespace {

int NumDevices() {
  static const int count = [] {
    int found = 0;
    return cudaGetDeviceCount(&found) == cudaSuccess ? found : 0;
  }();
  return count;
}

bool ReachEachOther(int a, int b) { return CanReach(a, b) && CanReach(b, a); }

}  // namespace

bool CanReach(int from, int to) {
  static const bool is_forbidden = IsSwitchedOff("JAX_TURBOBUS_PEER_ACCESS");
  if (is_forbidden) return false;
  if (from == to) return true;
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<int, int>, bool>;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known->try_emplace({from, to}, false);
  if (is_new) {
    int can_access = 0;
    entry->second =
        cudaDeviceCanAccessPeer(&can_access, from, to) == cudaSuccess &&
        can_access != 0;
    if (!entry->second) (void)cudaGetLastError();
  }
  return entry->second;
}

Wiring Wiring::Of(std::vector<int> devices, Schedule schedule) {
  Wiring wiring;
  for (const int from : devices) {
    for (const int to : devices) {
      if (from != to && !CanReach(from, to)) wiring.is_direct = false;
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
  if (ReachEachOther(from, to)) return {.kind = Path::Kind::kPeer};
  if (!has_relays) return {};
  for (int relay = 0; relay < NumDevices(); ++relay) {
    if (relay != from && relay != to && ReachEachOther(relay, from) &&
        ReachEachOther(relay, to)) {
      return {.kind = Path::Kind::kRelay, .relay = relay};
    }
  }
  return {};
}

}  // namespace turbobus::moe::cuda

#ifndef TURBOBUS_MOE_CUDA_GPU_TRAFFIC_H_
#define TURBOBUS_MOE_CUDA_GPU_TRAFFIC_H_

#include <atomic>
#include <compare>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "moe/cuda/gpu_exchange.h"
#include "moe/cuda/kernels.h"
#include "moe/traffic.h"

namespace turbobus::moe::cuda {

/// What the exchanges on this process's GPUs have sent, as `TrafficLog` has it
/// of CPU devices. How many rows go where only kernels know, so they add it up
/// in counters on their GPU: no call waits, launches or copies anything for it.
/// Counters stay where they are as long as the GPU's context lives, and only
/// grow; what a reset sets to zero is how they are read.
///
/// Thread-safe.
class GpuTraffic {
 public:
  enum class Op { kDispatch, kCombine, kDispatchGrad, kCombineGrad };
  /// What rows travel by: `kRings` is a path for each pair (`Wiring::Between`).
  enum class Means { kPeerMemory, kMail, kRings };

  /// What calls are told apart by.
  struct Kind {
    Op op = Op::kDispatch;
    Schedule schedule = Schedule::kDirect;  // The one that ran.
    Means means = Means::kPeerMemory;
    int num_ranks = 1;
    std::vector<int> devices;  // By rank, if paths depend on them; else empty.
    bool has_relays = false;

    friend auto operator<=>(const Kind&, const Kind&) = default;
  };

  static GpuTraffic& Process();

  /// Counts one rank's call, which `run(tally)` enqueues, and returns what that
  /// does. The current device must be the caller's. Calls are counted by rank
  /// 0.
  template <typename Run>
  Status Count(const Caller& caller, const Kind& kind, Run run) {
    Entry* const entry = Find(kind);
    const Status status = run(TallyOf(caller.device, entry));
    if (status.ok() && caller.rank == 0 && caller.batch == 0) {
      entry->num_calls.fetch_add(1, std::memory_order_relaxed);
    }
    return status;
  }

  /// Everything since the process began or the last `Reset`, one entry for each
  /// op, schedule, path and number of ranks. Blocks until the GPUs have done
  /// what they were given; INTERNAL, with CUDA's words, if one cannot;
  /// RESOURCE_EXHAUSTED if there were not counters for all.
  StatusOr<std::vector<Traffic>> Read();

  /// Starts again from zero; blocks as `Read`.
  Status Reset();

 private:
  static constexpr int kMaxDevices = 64;

  /// What kinds have counters in common: between the same ranks their bytes
  /// take the same paths, whichever GPUs these are.
  struct Counted {
    Op op = Op::kDispatch;
    Schedule schedule = Schedule::kDirect;
    int num_ranks = 1;
    std::vector<std::string> paths;  // [num_ranks, num_ranks]: from, to.

    friend auto operator<=>(const Counted&, const Counted&) = default;
  };

  struct Entry {
    int64_t first = 0;  // Its counters; -1: there were none left.
    std::atomic<int64_t> num_calls = 0;
    int64_t num_calls_before = 0;  // At the last reset; guarded by `mutex_`.
  };

  Entry* Find(const Kind& kind);
  Entry* Add(const Kind& kind);
  Tally TallyOf(int device, const Entry* entry);
  /// The counters of all GPUs together.
  StatusOr<std::vector<int64_t>> Sum();

  std::atomic<unsigned long long*> addresses_[kMaxDevices] = {};
  std::mutex mutex_;
  // All guarded by `mutex_`; entries stay where they are.
  std::map<Counted, Entry> entries_;
  std::map<Kind, Entry*> kinds_;
  int64_t num_counters_ = 0;
  std::vector<int64_t> before_;  // The counters at the last reset.
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_GPU_TRAFFIC_H_

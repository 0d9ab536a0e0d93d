#ifndef TURBOBUS_MOE_TRAFFIC_H_
#define TURBOBUS_MOE_TRAFFIC_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace turbobus::moe {

/// Who sends what to whom. In one address space rows are moved straight to
/// their places under all of them; the schedule says what a link between two
/// ranks carries: of a token one copy for each rank that has a row of it, or,
/// under kBroadcast, one for every rank.
enum class Schedule : int {
  kPacked = 0,
  kBroadcast = 1,
  kDirect = 2,
  kRelay = 3,
};
inline constexpr int kNumSchedules = 4;

const char* ScheduleName(Schedule schedule);

/// The bytes of one kind of exchange since the last reset.
struct Traffic {
  std::string op;
  Schedule schedule = Schedule::kPacked;
  /// What bytes went by: "memory" that all ranks share, or between GPUs "peer"
  /// (the other's memory), "mail" and "host" (pinned memory, by kernels and by
  /// copy engines) or "relay" (a third GPU's memory).
  std::string path;
  int num_ranks = 0;
  int64_t num_calls = 0;
  std::vector<int64_t> bytes;  // [num_ranks, num_ranks]: from, to. Diagonal 0.
};

/// Counts the exchanges of this process's CPU devices. Thread-safe.
class TrafficLog {
 public:
  static TrafficLog& Process();

  /// Adds one exchange. `bytes`: [num_ranks, num_ranks].
  void Add(const std::string& op, Schedule schedule, int num_ranks,
           const std::vector<int64_t>& bytes);

  std::vector<Traffic> Read() const;
  void Reset();

 private:
  using Kind = std::tuple<std::string, Schedule, int>;
  mutable std::mutex mutex_;
  std::map<Kind, Traffic> traffic_;  // Guarded by `mutex_`.
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_TRAFFIC_H_

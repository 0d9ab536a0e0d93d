#ifndef TURBOBUS_MOE_ROLL_CALL_H_
#define TURBOBUS_MOE_ROLL_CALL_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace turbobus::moe {

/// A place in a run of a program to which every rank of a group should come
/// equally often.
struct Place {
  int64_t run = 0;
  int64_t site = 0;   // In the program.
  int64_t group = 0;  // Among those that meet there.
  std::string op;     // As in "dispatch over axis 'x'".

  friend auto operator<=>(const Place&, const Place&) = default;
};

/// Says who is missing where ranks wait for each other in a way that nobody can
/// end: XLA's own collectives stop the process in the end, and name no rank.
///
/// Thread-safe. `Come` never waits for another rank; `report` is called on a
/// thread of the roll call's own, without a lock held.
class RollCall {
 public:
  using Clock = std::chrono::steady_clock;
  using Report = std::function<void(const std::string&)>;

  /// `patience` is how long others may wait before it is said.
  RollCall(std::function<std::chrono::milliseconds()> patience, Report report);
  ~RollCall();
  RollCall(const RollCall&) = delete;
  RollCall& operator=(const RollCall&) = delete;

  /// Writes to standard error once others have waited as long as exchanges
  /// may, or for 15 s: XLA gives up after a minute. Never destroyed.
  static RollCall& Process();

  /// `rank`, in [0, num_ranks), has come to `place` once more.
  void Come(const Place& place, int rank, int num_ranks);

  /// Reports what is overdue at `now`. The watcher calls it; tests move time.
  void Check(Clock::time_point now);

  /// Places to which some ranks have come more often than others.
  int64_t num_open() const;

 private:
  struct Roll {
    std::vector<int64_t> num_times;  // By rank.
    Clock::time_point since;
    bool is_reported = false;
  };

  void Watch();

  const std::function<std::chrono::milliseconds()> patience_;
  const Report report_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // All guarded by `mutex_`.
  std::map<Place, Roll> open_;
  bool is_closing_ = false;
  bool is_idle_ = false;
  std::thread watcher_;
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_ROLL_CALL_H_

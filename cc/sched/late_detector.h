#ifndef TURBOBUS_SCHED_LATE_DETECTOR_H_
#define TURBOBUS_SCHED_LATE_DETECTOR_H_

#include <cstdint>

namespace turbobus::sched {

/// Feels traffic that the scheduler cannot see (other processes, XLA's own
/// copies) by the delay of a lane's blocks, and tells a relay when to leave.
///
/// Backing off takes `kLateBlocks` late blocks in a row, so that one hiccup of
/// the machine does not cost a link. A backed-off relay is due a probe each
/// interval; the interval doubles with each late probe, and one probe on time
/// ends the matter.
class LateDetector {
 public:
  static constexpr int kLateBlocks = 3;

  struct Limits {
    double late_factor = 1.25;
    int64_t probe_interval_ns = 0;
    int64_t max_probe_interval_ns = 0;
  };

  LateDetector() = default;
  explicit LateDetector(const Limits& limits) : limits_(limits) {}

  /// A block took `actual_ns` where `expected_ns` were expected. It is not late
  /// if the lane that its bytes would take instead is `usual` times as slow as
  /// expected itself: what slows both is no reason to leave. Returns whether
  /// `is_backed_off` changed.
  bool Record(int64_t actual_ns, int64_t expected_ns, int64_t now_ns,
              double usual = 1);

  /// A block failed: as late as can be. Returns whether `is_backed_off`
  /// changed.
  bool Fail(int64_t now_ns);

  /// Recent block time over expected block time: a moving average, at least 1.
  double lateness() const { return lateness_; }
  bool is_backed_off() const { return probe_interval_ns_ > 0; }
  /// When a backed-off relay may copy a probe.
  int64_t next_probe_ns() const { return next_probe_ns_; }

 private:
  bool BackOff(int64_t now_ns);

  Limits limits_;
  double lateness_ = 1;
  int num_late_in_a_row_ = 0;
  int64_t probe_interval_ns_ = 0;
  int64_t next_probe_ns_ = 0;
};

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_LATE_DETECTOR_H_

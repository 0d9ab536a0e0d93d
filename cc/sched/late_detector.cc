#include "sched/late_detector.h"

#include <algorithm>

namespace turbobus::sched {
namespace {

/// Weight of the newest block: an estimate settles within about eight.
constexpr double kNewestWeight = 0.25;
/// One block that was stuck for seconds must not outweigh the next hundred.
constexpr double kMaxLateness = 16;

}  // namespace

bool LateDetector::Record(int64_t actual_ns, int64_t expected_ns,
                          int64_t now_ns, double usual) {
  const double ratio =
      std::clamp(static_cast<double>(actual_ns) /
                     static_cast<double>(std::max<int64_t>(expected_ns, 1)),
                 1.0, kMaxLateness);
  lateness_ += kNewestWeight * (ratio - lateness_);
  if (ratio > limits_.late_factor * usual) {
    ++num_late_in_a_row_;
    if (is_backed_off() || num_late_in_a_row_ >= kLateBlocks) {
      return BackOff(now_ns);
    }
    return false;
  }
  num_late_in_a_row_ = 0;
  if (!is_backed_off()) return false;
  probe_interval_ns_ = 0;
  lateness_ = ratio;
  return true;
}

bool LateDetector::Fail(int64_t now_ns) {
  lateness_ += kNewestWeight * (kMaxLateness - lateness_);
  return BackOff(now_ns);
}

bool LateDetector::BackOff(int64_t now_ns) {
  const bool is_new = !is_backed_off();
  probe_interval_ns_ =
      is_new ? limits_.probe_interval_ns
             : std::min(2 * probe_interval_ns_, limits_.max_probe_interval_ns);
  next_probe_ns_ = now_ns + probe_interval_ns_;
  return is_new;
}

}  // namespace turbobus::sched

#ifndef TURBOBUS_ENGINE_LANE_HEALTH_H_
#define TURBOBUS_ENGINE_LANE_HEALTH_H_

#include <algorithm>
#include <cstdint>

namespace turbobus::engine {

/// How much of a relay's link is left by traffic that the engine cannot see, as
/// far as its last transfers tell. Pure; not thread-safe.
class LaneHealth {
 public:
  /// Below this share a relay is not worth a part of a transfer, only a probe.
  static constexpr double kBackedOff = 0.125;

  /// A part that was clean of our own traffic took `elapsed_ns` instead of
  /// `expected_ns`. What is late by more than `late_factor` counts at once;
  /// better news is believed by halves.
  void Record(int64_t elapsed_ns, int64_t expected_ns, double late_factor) {
    const double seen = std::min(
        1.0, static_cast<double>(expected_ns) /
                 static_cast<double>(std::max<int64_t>(elapsed_ns, 1)));
    if (seen * late_factor < share_) {
      share_ = seen;
      ++num_late_;
    } else if (seen > share_) {
      share_ = seen * late_factor >= 1 ? (1 + share_) / 2 : (seen + share_) / 2;
      if (share_ > 0.9) share_ = 1;
    }
  }

  /// Of the path's rate: what to plan with.
  double share() const { return share_; }
  bool is_backed_off() const { return share_ < kBackedOff; }
  int64_t num_late() const { return num_late_; }

 private:
  double share_ = 1;
  int64_t num_late_ = 0;
};

/// Whether the lender of a link tends to be busy itself whenever another GPU's
/// transfers run, as in programs that do the same on every GPU: then lending
/// gains nothing. Pure; not thread-safe.
class Rivalry {
 public:
  /// The lender's own transfers overlapped with this part of one of ours.
  void Record(double overlap) {
    busy_ = (busy_ + std::clamp(overlap, 0.0, 1.0)) / 2;
  }

  bool is_likely() const { return busy_ > 0.4; }

 private:
  double busy_ = 0;
};

/// Whether borrowing a link has gained time, all in all. Blocks cannot be taken
/// back: where strangers keep the link for longer than a transfer takes, even a
/// probe waits for them. A relay that has cost more than it gained is left out
/// until what it cost beyond that is a small part of the time since. Pure; not
/// thread-safe.
class LoanBook {
 public:
  /// A single accident is forgiven, and forgotten losses are not made up for.
  static constexpr int64_t kFirstCreditNs = 100'000'000;
  static constexpr int64_t kMostCreditNs = 1'000'000'000;
  static constexpr int64_t kPauseFactor = 64;

  /// A transfer that ended at `now_ns` was so much sooner than it would have
  /// been without the relay; negative: later.
  void Record(int64_t saved_ns, int64_t now_ns) {
    credit_ns_ = std::min(credit_ns_ + saved_ns, kMostCreditNs);
    if (credit_ns_ >= 0) return;
    paused_until_ns_ =
        std::max(paused_until_ns_, now_ns - kPauseFactor * credit_ns_);
    credit_ns_ = 0;
  }

  bool is_paused(int64_t now_ns) const { return now_ns < paused_until_ns_; }

 private:
  int64_t credit_ns_ = kFirstCreditNs;
  int64_t paused_until_ns_ = INT64_MIN;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_LANE_HEALTH_H_

#ifndef TURBOBUS_SCHED_BACKLOG_H_
#define TURBOBUS_SCHED_BACKLOG_H_

#include <algorithm>
#include <cstdint>

namespace turbobus::sched {

/// How long something that serves blocks one after the other (a lane, a GPU's
/// link) will be busy with those in flight.
///
/// Knows only issue and completion times: the block in service is taken to have
/// started when the one before it ended.
class Backlog {
 public:
  void Add(int64_t now_ns, int64_t service_ns) {
    if (queued_ns_ == 0) since_ns_ = now_ns;
    queued_ns_ += service_ns;
  }

  void Remove(int64_t now_ns, int64_t service_ns) {
    queued_ns_ -= service_ns;
    since_ns_ = now_ns;
  }

  /// When a block issued now would start to be served, if those before it are
  /// on time; never before `now_ns`.
  int64_t FreeAt(int64_t now_ns) const {
    return queued_ns_ == 0 ? now_ns : std::max(now_ns, since_ns_ + queued_ns_);
  }

  /// The same, but what is overdue by x is expected to take another x.
  int64_t FreeAtIfLate(int64_t now_ns) const {
    const int64_t free_ns = FreeAt(now_ns);
    return queued_ns_ == 0 || free_ns > now_ns
               ? free_ns
               : now_ns + (now_ns - (since_ns_ + queued_ns_));
  }

  /// When the block in service began, if there is one.
  int64_t since_ns() const { return since_ns_; }

 private:
  int64_t since_ns_ = 0;
  int64_t queued_ns_ = 0;
};

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_BACKLOG_H_

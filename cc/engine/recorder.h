#ifndef TURBOBUS_ENGINE_RECORDER_H_
#define TURBOBUS_ENGINE_RECORDER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/engine.h"
#include "engine/live_page.h"
#include "engine/stats.h"
#include "sched/scheduler.h"
#include "transport/transport.h"

namespace turbobus::engine {

/// Keeps an engine's statistics and its trace. Thread-safe; never blocks beyond
/// a short lock. One thread (the control thread) writes, any may read.
class Recorder {
 public:
  /// Transfers that `Stats::recent_transfers` keeps.
  static constexpr size_t kNumRecentTransfers = 256;

  Recorder(const std::vector<topo::Path>& paths, double late_factor,
           Options options, int64_t now_ns);

  void OnSubmit();
  void OnIssue(const sched::Block& block);
  /// `block` was issued at `issued_ns` and is over, one way or the other.
  void OnBlockDone(const sched::Block& block, int64_t issued_ns,
                   const transport::BlockDone& done);
  void OnReissue();
  void OnLaneRemoved(int lane, const Status& reason);
  void OnTransferDone(const TransferStats& transfer);

  Stats Get(int64_t now_ns) const;
  std::vector<TraceEvent> Trace() const;

  /// How long `size_bytes` should take on lane `lane`, alone.
  double ExpectedNs(int lane, int64_t size_bytes) const;

 private:
  /// A number of intervals' union, given roughly in the order of their ends.
  struct Busy {
    int64_t until_ns = 0;
    int64_t total_ns = 0;
    void Add(int64_t start_ns, int64_t end_ns);
  };

  void AddToLinks(const sched::Block& block, const transport::BlockDone& done);
  void AddToTrace(const TraceEvent& event);
  void Publish(LivePage::Kind kind);

  const double late_factor_;
  const size_t trace_capacity_;
  std::vector<std::vector<std::vector<int>>> lane_links_;  // fixed once made
  std::vector<double> ns_per_byte_;                        // by lane; likewise
  /// Rows: the lanes, then the links. Null: not published.
  std::unique_ptr<LivePage> live_;

  mutable std::mutex mutex_;
  Stats stats_;
  std::vector<Busy> lane_busy_;
  std::vector<Busy> link_busy_;
  std::deque<TransferStats> recent_;
  std::deque<TraceEvent> trace_;
};

/// Names lanes "gpu0 h2d" and "gpu0 h2d via gpu1", and links by number and
/// direction, for a transport whose topology nobody has.
Labels DefaultLabels(const std::vector<topo::Path>& paths);

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_RECORDER_H_

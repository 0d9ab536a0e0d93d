#ifndef TURBOBUS_ENGINE_DRIVER_H_
#define TURBOBUS_ENGINE_DRIVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/recorder.h"
#include "sched/scheduler.h"
#include "transport/transport.h"

namespace turbobus::engine {

/// Steps a scheduler over a transport: what the control thread does, without
/// the thread. Everything runs on the caller's; not thread-safe.
///
/// Failure rules. A block that fails is given back to the scheduler, which
/// issues its bytes again on another lane. Bytes that have failed twice, and on
/// the direct lane, fail their transfer. A lane that answers UNAVAILABLE is
/// taken out. A transfer is released only when the transport has returned every
/// block of it, also those that no longer count.
class Driver {
 public:
  /// `transport` and `recorder` outlive the driver. `complete` takes what must
  /// be called when a transfer is over; it must not block.
  Driver(std::unique_ptr<sched::Scheduler> scheduler,
         transport::Transport& transport, Recorder& recorder,
         std::function<void(std::function<void(Status)>, Status)> complete);

  void Submit(sched::TransferId id, Request request, int64_t submitted_ns);
  void Cancel(sched::TransferId id);
  void FailAll(const Status& reason);

  /// Issues what the scheduler has for the lanes and releases what is over.
  void Issue();

  /// Waits once for the transport, at most until the scheduler wants to be
  /// asked again, and takes in what is done.
  void WaitAndCollect();

  bool is_idle() const { return live_.empty(); }

 private:
  struct FailedRange {
    int64_t offset_bytes = 0;
    int64_t size_bytes = 0;
    bool is_direct = false;
  };
  struct Live {
    Request request{};
    TransferStats stats{};
    int64_t num_copied_bytes = 0;
    int num_outstanding = 0;
    /// The scheduler has nothing more to do for it.
    bool is_over = false;
    std::optional<Status> failure{};
    std::vector<FailedRange> failed_ranges{};
  };
  struct InFlight {
    sched::Block block{};
    int64_t issued_ns = 0;
    /// The scheduler gave the block up with its lane; only its end is awaited.
    bool is_abandoned = false;
  };

  int64_t Now() { return Monotonic(transport_.NowNs()); }
  int64_t Monotonic(int64_t ns);

  void IssueBlock(const sched::Block& block);
  void OnDone(const transport::BlockDone& done);
  void OnBlockFailed(const sched::Block& block, const Status& status);
  bool MayRetry(Live& live, const sched::Block& block);
  void RemoveLane(int lane, const Status& reason);
  void FailTransfer(sched::TransferId id, Live& live, Status status);
  void DropBlocks(sched::TransferId id);
  void TakeOver();
  void FailStalled();
  void MarkOver(sched::TransferId id, std::optional<Status> failure);
  void ReleaseIfOver(sched::TransferId id);

  const std::unique_ptr<sched::Scheduler> scheduler_;
  transport::Transport& transport_;
  Recorder& recorder_;
  const std::function<void(std::function<void(Status)>, Status)> complete_;
  std::map<sched::TransferId, Live> live_;
  std::map<uint64_t, InFlight> in_flight_;
  std::map<int, Status> removed_lanes_;
  std::vector<transport::BlockDone> done_;
  uint64_t next_copy_id_ = 1;
  int64_t last_now_ns_ = 0;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_DRIVER_H_

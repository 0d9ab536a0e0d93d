#include "engine/driver.h"

#include <algorithm>
#include <string>
#include <utility>

namespace turbobus::engine {
namespace {

constexpr int kMaxDonePerWait = 64;
// A scheduler that asks to be woken in the past must not spin the thread.
constexpr int64_t kMinWaitNs = 100'000;
// Bytes that keep failing on relays although the direct lane lives.
constexpr int kMaxFailures = 8;

std::string DirectionName(topo::Direction direction) {
  return direction == topo::Direction::kH2d ? "h2d" : "d2h";
}

}  // namespace

Driver::Driver(
    std::unique_ptr<sched::Scheduler> scheduler,
    transport::Transport& transport, Recorder& recorder,
    std::function<void(std::function<void(Status)>, Status)> complete)
    : scheduler_(std::move(scheduler)),
      transport_(transport),
      recorder_(recorder),
      complete_(std::move(complete)),
      done_(kMaxDonePerWait) {}

void Driver::Submit(sched::TransferId id, Request request,
                    int64_t submitted_ns) {
  const sched::Transfer transfer{.id = id,
                                 .gpu = request.gpu,
                                 .direction = request.direction,
                                 .size_bytes = request.size_bytes,
                                 .numa_node = request.numa_node};
  Live& live = live_[id];
  live.stats = {.id = id,
                .gpu = request.gpu,
                .direction = request.direction,
                .size_bytes = request.size_bytes,
                .submitted_ns = submitted_ns};
  live.request = std::move(request);
  if (Status status = scheduler_->Submit(transfer, Now()); !status.ok()) {
    // Its lanes have vanished since it was checked: say why.
    for (const auto& [lane, reason] : removed_lanes_) {
      const topo::Path& path = transport_.paths()[lane];
      if (path.gpu == transfer.gpu && path.direction == transfer.direction &&
          !path.is_relay()) {
        status = reason;
      }
    }
    MarkOver(id, std::move(status));
  }
}

void Driver::Cancel(sched::TransferId id) {
  const auto it = live_.find(id);
  if (it == live_.end() || it->second.is_over || it->second.failure) return;
  static_cast<void>(scheduler_->Cancel(id, Now()));
  DropBlocks(id);
}

void Driver::FailAll(const Status& reason) {
  for (auto& [id, live] : live_) {
    if (!live.is_over) FailTransfer(id, live, reason);
  }
}

void Driver::Issue() {
  while (const std::optional<sched::Block> block = scheduler_->Next(Now())) {
    IssueBlock(*block);
  }
  TakeOver();
  if (in_flight_.empty() && !scheduler_->NextWakeupNs()) FailStalled();
}

void Driver::WaitAndCollect() {
  int64_t timeout_ns = -1;
  if (const std::optional<int64_t> wakeup_ns = scheduler_->NextWakeupNs()) {
    timeout_ns = std::max(*wakeup_ns - transport_.NowNs(), kMinWaitNs);
  }
  const int num_done = transport_.Wait(done_, timeout_ns);
  for (int i = 0; i < num_done; ++i) OnDone(done_[i]);
}

int64_t Driver::Monotonic(int64_t ns) {
  last_now_ns_ = std::max(last_now_ns_, ns);
  return last_now_ns_;
}

void Driver::IssueBlock(const sched::Block& block) {
  Live& live = live_.at(block.transfer);
  const uint64_t id = next_copy_id_++;
  const int64_t issued_ns = Now();
  // Known to be in flight before it is: a transport may end it at once.
  in_flight_[id] = {.block = block, .issued_ns = issued_ns};
  ++live.num_outstanding;
  ++live.stats.num_blocks;
  recorder_.OnIssue(block);
  const Status status = transport_.Issue(
      {.id = id,
       .lane = block.lane,
       .src = static_cast<const char*>(live.request.src) + block.offset_bytes,
       .dst = static_cast<char*>(live.request.dst) + block.offset_bytes,
       .size_bytes = block.size_bytes});
  if (status.ok()) return;
  OnDone(
      {.id = id, .status = status, .start_ns = issued_ns, .end_ns = issued_ns});
}

void Driver::OnDone(const transport::BlockDone& done) {
  const auto it = in_flight_.find(done.id);
  if (it == in_flight_.end()) return;
  const InFlight in_flight = it->second;
  const sched::Block& block = in_flight.block;
  in_flight_.erase(it);
  recorder_.OnBlockDone(block, in_flight.issued_ns, done);

  Live& live = live_.at(block.transfer);
  --live.num_outstanding;
  if (live.stats.started_ns == 0) live.stats.started_ns = done.start_ns;
  if (in_flight.is_abandoned) {
    // The scheduler has forgotten this block.
  } else if (done.status.ok()) {
    live.num_copied_bytes += block.size_bytes;
    if (transport_.paths()[block.lane].is_relay()) {
      live.stats.num_relayed_bytes += block.size_bytes;
    }
    static_cast<void>(scheduler_->Complete(block.id, Monotonic(done.end_ns)));
  } else {
    OnBlockFailed(block, done.status);
  }
  ReleaseIfOver(block.transfer);
}

void Driver::OnBlockFailed(const sched::Block& block, const Status& status) {
  Live& live = live_.at(block.transfer);
  const bool is_wanted =
      !live.failure && status.code() != StatusCode::kCancelled;
  if (is_wanted) {
    recorder_.OnReissue();
    ++live.stats.num_reissued_blocks;
    live.stats.reissue_reason = status.message();
  }
  if (status.code() == StatusCode::kUnavailable) {
    RemoveLane(block.lane, status);  // which queues this block again, too
    return;
  }
  if (is_wanted && !MayRetry(live, block)) {
    FailTransfer(block.transfer, live,
                 status.WithContext("block at byte " +
                                    std::to_string(block.offset_bytes) +
                                    " failed on the direct lane too"));
  }
  static_cast<void>(scheduler_->Fail(block.id, Now()));
}

// Whether the bytes of a block that has just failed get another chance.
bool Driver::MayRetry(Live& live, const sched::Block& block) {
  const FailedRange failed{
      .offset_bytes = block.offset_bytes,
      .size_bytes = block.size_bytes,
      .is_direct = !transport_.paths()[block.lane].is_relay()};
  live.failed_ranges.push_back(failed);
  int num_failures = 0;
  bool has_failed_direct = false;
  for (const FailedRange& other : live.failed_ranges) {
    const bool overlaps =
        other.offset_bytes < failed.offset_bytes + failed.size_bytes &&
        failed.offset_bytes < other.offset_bytes + other.size_bytes;
    if (!overlaps) continue;
    ++num_failures;
    has_failed_direct |= other.is_direct;
  }
  return num_failures < 2 ||
         (!has_failed_direct && num_failures < kMaxFailures);
}

void Driver::RemoveLane(int lane, const Status& reason) {
  if (!removed_lanes_.try_emplace(lane, reason).second) return;
  recorder_.OnLaneRemoved(lane, reason);
  for (auto& [id, in_flight] : in_flight_) {
    if (in_flight.block.lane != lane || in_flight.is_abandoned) continue;
    in_flight.is_abandoned = true;
    recorder_.OnReissue();
    Live& live = live_.at(in_flight.block.transfer);
    ++live.stats.num_reissued_blocks;
    live.stats.reissue_reason = reason.message();
  }
  static_cast<void>(scheduler_->RemoveLane(lane, Now()));
}

void Driver::FailTransfer(sched::TransferId id, Live& live, Status status) {
  if (live.failure) return;
  live.failure = std::move(status);
  static_cast<void>(scheduler_->Cancel(id, Now()));
  DropBlocks(id);
}

void Driver::DropBlocks(sched::TransferId id) {
  // From the last one, so that no lane turns to a block about to be dropped.
  for (auto it = in_flight_.rbegin(); it != in_flight_.rend(); ++it) {
    if (it->second.block.transfer == id) transport_.Drop(it->first);
  }
}

void Driver::TakeOver() {
  for (const sched::Finished& finished : scheduler_->TakeFinished()) {
    MarkOver(finished.transfer,
             finished.is_cancelled
                 ? std::optional(Cancelled("transfer " +
                                           std::to_string(finished.transfer) +
                                           " was cancelled"))
                 : std::nullopt);
  }
  for (const sched::TransferId id : scheduler_->TakeStranded()) {
    const auto it = live_.find(id);
    if (it == live_.end()) continue;
    const Request& request = it->second.request;
    std::string message = "no lane is left for gpu " +
                          std::to_string(request.gpu) + " " +
                          DirectionName(request.direction);
    for (const auto& [lane, reason] : removed_lanes_) {
      const topo::Path& path = transport_.paths()[lane];
      if (path.gpu == request.gpu && path.direction == request.direction) {
        message += "; " + reason.message();
      }
    }
    MarkOver(id, Unavailable(std::move(message)));
  }
}

// A transfer that nothing moves any more must end with an error, not hang.
void Driver::FailStalled() {
  while (!live_.empty()) {
    MarkOver(live_.begin()->first,
             Internal("the scheduler has stalled: nothing is in flight and it "
                      "issues nothing; please report this"));
  }
}

void Driver::MarkOver(sched::TransferId id, std::optional<Status> failure) {
  const auto it = live_.find(id);
  if (it == live_.end()) return;
  it->second.is_over = true;
  // The first failure is the reason; a cancellation that it caused is not.
  if (failure && !it->second.failure) it->second.failure = std::move(failure);
  ReleaseIfOver(id);
}

void Driver::ReleaseIfOver(sched::TransferId id) {
  const auto it = live_.find(id);
  if (it == live_.end() || !it->second.is_over ||
      it->second.num_outstanding > 0) {
    return;
  }
  Live live = std::move(it->second);
  live_.erase(it);
  Status status = live.failure.value_or(OkStatus());
  if (status.ok() && live.num_copied_bytes != live.request.size_bytes) {
    status =
        Internal("transfer " + std::to_string(id) + " ended with " +
                 std::to_string(live.num_copied_bytes) + " of " +
                 std::to_string(live.request.size_bytes) + " bytes copied");
  }
  live.stats.status = status;
  live.stats.ended_ns = Now();
  recorder_.OnTransferDone(live.stats);
  complete_(std::move(live.request.done), std::move(status));
}

}  // namespace turbobus::engine

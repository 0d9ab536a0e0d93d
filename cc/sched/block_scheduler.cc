#include "sched/block_scheduler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "sched/block_size.h"
#include "sched/finish_time.h"

// Events: what arrives, completes, fails, is cancelled or vanishes.

namespace turbobus::sched {
namespace {

/// Added to what a block may take before it counts as late: what issuing and
/// noticing cost (measured per copy on 2 x H200, driver 580: 3 to 20 us).
constexpr int64_t kGraceNs = 20'000;

std::string Describe(const Transfer& transfer) {
  return "transfer " + std::to_string(transfer.id);
}

std::string_view Name(topo::Direction direction) {
  return direction == topo::Direction::kH2d ? "h2d" : "d2h";
}

}  // namespace

StatusOr<std::unique_ptr<Scheduler>> Scheduler::Create(Config config) {
  TB_ASSIGN_OR_RETURN(Tables tables, Tables::Create(std::move(config)));
  return std::unique_ptr<Scheduler>(
      std::make_unique<BlockScheduler>(std::move(tables)));
}

BlockScheduler::BlockScheduler(Tables tables) : tables_(std::move(tables)) {
  const int num_links = static_cast<int>(tables_.links.size());
  own_marks_ = BitSet(num_links);
  relay_marks_ = BitSet(num_links);
  timed_links_ = BitSet(num_links);
}

Status BlockScheduler::Submit(const Transfer& transfer, int64_t /*now_ns*/) {
  if (transfer.size_bytes < 0) {
    return InvalidArgument(Describe(transfer) +
                           ": size_bytes: expected >= 0, got " +
                           std::to_string(transfer.size_bytes));
  }
  if (slots_by_id_.contains(transfer.id)) {
    return InvalidArgument(Describe(transfer) +
                           ": id: a transfer with this id is not over yet");
  }
  const int q =
      tables_.FindQueue(transfer.gpu, transfer.direction, transfer.numa_node);
  if (q == kNone) {
    return InvalidArgument(Describe(transfer) +
                           ": gpu: no direct lane for GPU " +
                           std::to_string(transfer.gpu) + " " +
                           std::string(Name(transfer.direction)));
  }
  const Queue& queue = tables_.queues[q];
  if (queue.is_orphan() && queue.relays.empty()) {
    return Unavailable(Describe(transfer) + ": every lane of GPU " +
                       std::to_string(transfer.gpu) + " " +
                       std::string(Name(transfer.direction)) +
                       " has been removed");
  }
  if (transfer.size_bytes == 0) {
    finished_.push_back({.transfer = transfer.id});
    return OkStatus();
  }
  const int t = NewTransfer();
  slots_by_id_.emplace(transfer.id, t);
  TransferState& state = tables_.transfers[t];
  const Config& config = tables_.config;
  state.id = transfer.id;
  state.queue = q;
  state.size_bytes = transfer.size_bytes;
  state.block_bytes = BlockBytes(transfer.size_bytes, config.block_bytes);
  state.is_small = IsSmall(transfer.size_bytes, config.block_bytes);
  state.is_large = transfer.size_bytes > config.chunk_bytes;
  if (state.is_large) {
    tables_.links[queue.host_link].token.PushBack(tables_.transfers, t);
  }
  Enqueue(t, transfer.size_bytes);
  return OkStatus();
}

Status BlockScheduler::Complete(BlockId block, int64_t now_ns) {
  InFlight* in_flight = Find(block);
  if (in_flight == nullptr) {
    return NotFound("block " + std::to_string(block) + " is not in flight");
  }
  LearnLateness(*in_flight, now_ns);
  FinishIfDone(Retire(*in_flight, now_ns).transfer);
  return OkStatus();
}

Status BlockScheduler::Fail(BlockId block, int64_t now_ns) {
  InFlight* in_flight = Find(block);
  if (in_flight == nullptr) {
    return NotFound("block " + std::to_string(block) + " is not in flight");
  }
  InFlight failed = Retire(*in_flight, now_ns);
  Lane& lane = tables_.lanes[failed.lane];
  if (lane.is_relay && lane.late.Fail(now_ns)) MarkAll();
  if (tables_.transfers[failed.transfer].is_cancelled) {
    FinishIfDone(failed.transfer);
    return OkStatus();
  }
  failed.extent.failed_lane = failed.lane;
  ++failed.extent.num_failures;
  Return(failed.transfer, failed.extent);
  return OkStatus();
}

Status BlockScheduler::Cancel(TransferId transfer, int64_t /*now_ns*/) {
  const auto found = slots_by_id_.find(transfer);
  if (found == slots_by_id_.end()) {
    return NotFound("transfer " + std::to_string(transfer) +
                    " is unknown or over");
  }
  const int t = found->second;
  tables_.transfers[t].is_cancelled = true;
  tables_.transfers[t].returned.clear();
  Dequeue(t);
  FinishIfDone(t);
  return OkStatus();
}

Status BlockScheduler::RemoveLane(int lane, int64_t now_ns) {
  if (lane < 0 || lane >= static_cast<int>(tables_.lanes.size()) ||
      tables_.lanes[lane].is_removed) {
    return NotFound("lane " + std::to_string(lane) +
                    " does not exist or has been removed");
  }
  DetachLane(lane);
  for (InFlight& in_flight : in_flight_) {
    if (in_flight.lane != lane) continue;
    const InFlight lost = Retire(in_flight, now_ns);
    if (tables_.transfers[lost.transfer].is_cancelled) {
      FinishIfDone(lost.transfer);
    } else {
      Return(lost.transfer, lost.extent);
    }
  }
  Queue& queue = tables_.queues[tables_.lanes[lane].queue];
  if (queue.is_orphan() && queue.relays.empty()) Strand(queue);
  MarkAll();
  return OkStatus();
}

void BlockScheduler::DetachLane(int lane) {
  Lane& l = tables_.lanes[lane];
  Queue& queue = tables_.queues[l.queue];
  HostLink& link = tables_.links[l.host_link];
  l.is_removed = true;
  queue.total_rate_bytes_per_s -= l.rate_bytes_per_s;
  if (l.is_relay) {
    std::erase(queue.relays, lane);
    std::erase(link.borrowers, lane);
    UpdateSharing(l);
    return;
  }
  if (queue.is_waiting) {
    queue.is_waiting = false;
    --link.num_own_waiting;
    CountOwnRates(tables_);
  }
  queue.direct = kNone;
  for (int t = queue.queued.front(); t != kNone;
       t = queue.queued.Next(tables_.transfers, t)) {
    UpdateRelayable(t);
  }
}

BlockScheduler::InFlight* BlockScheduler::Find(BlockId block) {
  const int64_t slot = block & ((int64_t{1} << kSlotBits) - 1);
  if (block < 0 || slot >= static_cast<int64_t>(in_flight_.size())) {
    return nullptr;
  }
  InFlight& in_flight = in_flight_[slot];
  const bool is_it =
      in_flight.lane != kNone && in_flight.generation == block >> kSlotBits;
  return is_it ? &in_flight : nullptr;
}

BlockScheduler::InFlight BlockScheduler::Retire(InFlight& in_flight,
                                                int64_t now_ns) {
  const InFlight retired = in_flight;
  in_flight.lane = kNone;
  free_in_flight_.push_back(static_cast<int>(&in_flight - in_flight_.data()));
  --num_in_flight_;

  Lane& lane = tables_.lanes[retired.lane];
  HostLink& link = tables_.links[lane.host_link];
  lane.backlog.Remove(now_ns, retired.service_ns);
  link.backlog.Remove(now_ns, link.ServiceNs(retired.extent.size_bytes));
  lane.in_flight_bytes -= retired.extent.size_bytes;
  --lane.num_in_flight;
  if (lane.num_in_flight == 0) CountActive(lane, -1);
  if (lane.is_relay) {
    link.relay_in_flight_bytes -= retired.extent.size_bytes;
    link.num_borrowing -= lane.num_in_flight == 0;
    UpdateSharing(lane);
  } else {
    --link.num_own_in_flight;
  }
  --tables_.transfers[retired.transfer].num_in_flight;
  own_marks_.Add(lane.host_link);
  relay_marks_.Add(lane.host_link);
  MarkDeferred(tables_.queues[lane.queue]);
  return retired;
}

void BlockScheduler::LearnLateness(const InFlight& in_flight, int64_t now_ns) {
  Lane& lane = tables_.lanes[in_flight.lane];
  const int64_t size_bytes = in_flight.extent.size_bytes;
  // Small blocks tell more about overheads than about the link.
  if (2 * size_bytes < std::min(kMinBlockBytes, tables_.config.block_bytes)) {
    return;
  }
  // Blocks before it on its lane are not its own delay, nor is what it shares
  // with others: by its caps, or if it has none, the blocks before it on the
  // link.
  const Backlog& before =
      lane.caps.empty() ? tables_.links[lane.host_link].backlog : lane.backlog;
  const int64_t start_ns = std::max(in_flight.issue_ns, before.since_ns());
  const int64_t latency_ns =
      start_ns == in_flight.issue_ns ? lane.latency_ns : 0;
  const double stretch =
      std::max(in_flight.cap_stretch, CapStretch(tables_, lane));
  const auto service_ns = static_cast<int64_t>(static_cast<double>(size_bytes) *
                                               lane.ns_per_byte * stretch);
  // A relay that is as slow as the direct lane shares what slows that (the
  // other direction's bytes, the host's memory): both together are still sooner
  // done.
  const int direct = tables_.queues[lane.queue].direct;
  const double usual = lane.is_relay && direct != kNone
                           ? tables_.lanes[direct].late.lateness()
                           : 1;
  const bool is_changed = lane.late.Record(
      now_ns - start_ns, service_ns + latency_ns + kGraceNs, now_ns, usual);
  // A direct lane has nowhere to go; its lateness counts in finish times.
  if (is_changed && lane.is_relay) MarkAll();
}

std::vector<Finished> BlockScheduler::TakeFinished() {
  return std::exchange(finished_, {});
}

std::vector<TransferId> BlockScheduler::TakeStranded() {
  return std::exchange(stranded_, {});
}

std::optional<int64_t> BlockScheduler::NextWakeupNs() const {
  // Within a slot nothing but its end matters.
  const bool is_in_slot = tables_.config.mode == Mode::kLockStep &&
                          num_in_flight_ > 0 && !is_slot_open_;
  if (wakeup_ns_ == kNever || is_idle() || is_in_slot) return {};
  return wakeup_ns_;
}

LaneState BlockScheduler::lane_state(int lane) const {
  const Lane& l = tables_.lanes[lane];
  return {.in_flight_bytes = l.in_flight_bytes,
          .num_issued_blocks = l.num_issued_blocks,
          .issued_bytes = l.issued_bytes,
          .lateness = l.late.lateness(),
          .is_backed_off = l.is_relay && l.late.is_backed_off(),
          .is_removed = l.is_removed};
}

}  // namespace turbobus::sched

#include <algorithm>

#include "sched/block_scheduler.h"
#include "sched/block_size.h"

// What a link does next: its own GPU's traffic first, then what it relays.

namespace turbobus::sched {
namespace {

/// A probe is this part of a block, so that a busy relay loses little time to
/// it.
constexpr int64_t kProbeParts = 4;

}  // namespace

std::optional<Block> BlockScheduler::Next(int64_t now_ns) {
  if (tables_.config.mode == Mode::kLockStep && !OpenSlot()) return {};
  if (now_ns >= wakeup_ns_) {
    relay_marks_.Add(timed_links_);
    timed_links_.Clear();
    wakeup_ns_ = kNever;
  }
  // Direct lanes first: relays then see what is left.
  for (int link; (link = own_marks_.First()) >= 0;) {
    if (const auto choice = ChooseOwn(link, now_ns)) {
      return Issue(*choice, now_ns);
    }
    own_marks_.Remove(link);
  }
  for (int link; (link = relay_marks_.First()) >= 0;) {
    if (const auto choice = ChooseRelayed(link, now_ns)) {
      return Issue(*choice, now_ns);
    }
    relay_marks_.Remove(link);
  }
  is_slot_open_ = false;
  return {};
}

bool BlockScheduler::OpenSlot() {
  if (num_in_flight_ > 0) return is_slot_open_;
  ++slot_;
  is_slot_open_ = true;
  MarkAll();
  // A slot lasts as long as the fastest lane with work needs for a block.
  slot_ns_per_byte_ = 0;
  const auto consider = [&](int lane) {
    const double ns_per_byte = tables_.lanes[lane].ns_per_byte;
    if (slot_ns_per_byte_ == 0 || ns_per_byte < slot_ns_per_byte_) {
      slot_ns_per_byte_ = ns_per_byte;
    }
  };
  for (const Queue& queue : tables_.queues) {
    if (queue.queued.empty()) continue;
    if (!queue.is_orphan()) consider(queue.direct);
    if (!queue.relayable.empty()) {
      for (int lane : queue.relays) consider(lane);
    }
  }
  return true;
}

std::optional<BlockScheduler::Choice> BlockScheduler::ChooseOwn(
    int link, int64_t now_ns) {
  const HostLink& l = tables_.links[link];
  if (l.num_own_waiting == 0) return {};
  if (tables_.config.mode == Mode::kLockStep && l.slot == slot_) return {};
  std::optional<Choice> best;
  for (int q : l.queues) {
    Queue& queue = tables_.queues[q];
    if (!queue.is_waiting) continue;
    if (best && tables_.transfers[queue.queued.front()].sequence >
                    tables_.transfers[best->transfer].sequence) {
      continue;
    }
    if (const auto choice = DirectTakes(queue, now_ns)) best = choice;
  }
  return best;
}

std::optional<BlockScheduler::Choice> BlockScheduler::DirectTakes(
    Queue& queue, int64_t now_ns) {
  const int t = queue.queued.front();
  const TransferState& transfer = tables_.transfers[t];
  const Lane& lane = tables_.lanes[queue.direct];
  const Choice choice = {.lane = queue.direct,
                         .transfer = t,
                         .piece = DirectPiece(transfer, queue.direct, now_ns)};
  const int64_t size_bytes = choice.piece.size_bytes;
  if (size_bytes == 0) {
    queue.is_direct_deferred = queue.has_deferred = true;
    return {};
  }
  if (lane.num_in_flight == 0) return choice;
  if (lane.in_flight_bytes + size_bytes > lane.window_bytes) return {};
  // To queue a block behind another pays only where no relay would be through
  // with it sooner.
  if (transfer.relayable.is_linked) {
    if (OthersFinishBefore(tables_, transfer, queue.direct, size_bytes,
                           FinishNs(tables_, lane, size_bytes, now_ns),
                           now_ns)) {
      queue.is_direct_deferred = queue.has_deferred = true;
      return {};
    }
  }
  return choice;
}

std::optional<BlockScheduler::Choice> BlockScheduler::ChooseRelayed(
    int link, int64_t now_ns) {
  const HostLink& l = tables_.links[link];
  if (tables_.config.mode == Mode::kLockStep && l.slot == slot_) return {};
  std::optional<Choice> best;
  for (int lane : l.borrowers) {
    const Queue& queue = tables_.queues[tables_.lanes[lane].queue];
    if (queue.relayable.empty()) continue;
    const auto sequence = [&](int t) { return tables_.transfers[t].sequence; };
    if (best && sequence(queue.relayable.front()) > sequence(best->transfer)) {
      continue;
    }
    const auto choice = RelayTakes(lane, now_ns);
    if (choice &&
        (!best || sequence(choice->transfer) < sequence(best->transfer))) {
      best = choice;
    }
  }
  return best;
}

std::optional<BlockScheduler::Choice> BlockScheduler::RelayTakes(
    int lane, int64_t now_ns) {
  const Lane& l = tables_.lanes[lane];
  Queue& queue = tables_.queues[l.queue];
  for (int t = queue.relayable.front(); t != kNone;
       t = queue.relayable.Next(tables_.transfers, t)) {
    const Choice choice = {.lane = lane,
                           .transfer = t,
                           .piece = RelayPiece(tables_.transfers[t], lane)};
    if (choice.piece.size_bytes == 0) continue;
    const bool is_open = IsOpen(lane, choice.piece.size_bytes, now_ns);
    // There may be room for the last piece, once others have had those before.
    if (!is_open && !IsOpen(lane, 1, now_ns)) return {};
    if (is_open && IsWorthRelaying(choice, now_ns)) return choice;
    queue.deferred_links.Add(l.host_link);
    queue.has_deferred = true;
    if (!is_open) return {};
  }
  return {};
}

bool BlockScheduler::IsWorthRelaying(const Choice& choice,
                                     int64_t now_ns) const {
  const TransferState& transfer = tables_.transfers[choice.transfer];
  if (tables_.queues[transfer.queue].is_orphan()) return true;
  if (choice.piece.returned != kNone &&
      transfer.returned[choice.piece.returned].failed_lane != kNone) {
    return true;  // the direct lane has failed on it
  }
  const Lane& lane = tables_.lanes[choice.lane];
  const int64_t size_bytes = choice.piece.size_bytes;
  const int64_t finish_ns = FinishNs(tables_, lane, size_bytes, now_ns);
  return FinishesBeforeDirect(tables_, transfer, finish_ns, now_ns) &&
         !OthersFinishBefore(tables_, transfer, choice.lane, size_bytes,
                             finish_ns, now_ns);
}

bool BlockScheduler::IsOpen(int lane, int64_t size_bytes, int64_t now_ns) {
  const Lane& l = tables_.lanes[lane];
  const HostLink& link = tables_.links[l.host_link];
  const bool is_orphan = tables_.queues[l.queue].is_orphan();
  if (!is_orphan && link.is_needed()) return false;
  if (!is_orphan && l.late.is_backed_off()) {
    if (l.num_in_flight > 0) return false;
    if (now_ns < l.late.next_probe_ns()) {
      WakeAt(l.host_link, l.late.next_probe_ns());
      return false;
    }
  }
  const int64_t share_bytes = std::min(
      l.window_bytes, link.relay_window_bytes / std::max(1, link.num_sharing));
  if (l.num_in_flight > 0 && l.in_flight_bytes + size_bytes > share_bytes) {
    return false;
  }
  if (link.relay_in_flight_bytes + size_bytes > link.relay_window_bytes) {
    return false;
  }
  // Slots have no clock: there caps limit the size of a block (`MaxBytes`).
  if (is_orphan || tables_.config.mode == Mode::kLockStep) return true;
  const int64_t open_ns = CapsOpenNs(tables_, l, size_bytes, now_ns);
  if (open_ns <= now_ns) return true;
  if (open_ns != kNever) WakeAt(l.host_link, open_ns);
  return false;
}

bool BlockScheduler::IsAnyRelayOpen(const TransferState& transfer,
                                    int64_t now_ns) {
  const Queue& queue = tables_.queues[transfer.queue];
  return std::any_of(queue.relays.begin(), queue.relays.end(), [&](int lane) {
    return RelayPiece(transfer, lane).size_bytes > 0 && IsOpen(lane, 1, now_ns);
  });
}

int64_t BlockScheduler::MaxBytes(const TransferState& transfer,
                                 const Lane& lane) const {
  double share = 1;
  if (!tables_.queues[lane.queue].is_orphan()) {
    share = lane.block_part;
    if (tables_.config.mode == Mode::kLockStep) {
      share = std::min(
          share, slot_ns_per_byte_ / (lane.ns_per_byte * lane.late.lateness()));
      if (lane.is_relay) share = std::min(share, CapShare(tables_, lane));
    }
  }
  int64_t bytes = transfer.block_bytes;
  if (share < 1) {
    const int64_t part = std::max<int64_t>(bytes / kBlockParts, 1);
    const auto num_parts = static_cast<int64_t>(
        share * static_cast<double>(bytes) / static_cast<double>(part) + 0.01);
    if (num_parts == 0 && lane.is_relay) return 0;
    bytes = std::min(bytes, std::max<int64_t>(num_parts, 1) * part);
  }
  if (lane.late.is_backed_off() && lane.is_relay) {
    bytes = std::min(bytes, std::max(bytes / kProbeParts, kMinBlockBytes));
  }
  return std::min(bytes, lane.window_bytes);
}

BlockScheduler::Piece BlockScheduler::DirectPiece(const TransferState& transfer,
                                                  int lane, int64_t now_ns) {
  const int64_t max_bytes = MaxBytes(transfer, tables_.lanes[lane]);
  Piece failed;
  for (size_t i = 0; i < transfer.returned.size(); ++i) {
    const Extent& extent = transfer.returned[i];
    const Piece piece = {.returned = static_cast<int>(i),
                         .size_bytes = std::min(max_bytes, extent.size_bytes)};
    if (extent.failed_lane != lane) return piece;
    failed = piece;
  }
  const int64_t fresh = transfer.size_bytes - transfer.next_offset_bytes;
  if (fresh > 0) return {.size_bytes = std::min(max_bytes, fresh)};
  // What failed here is left to a relay if one can have it now.
  if (IsAnyRelayOpen(transfer, now_ns)) return {};
  return failed;
}

BlockScheduler::Piece BlockScheduler::RelayPiece(const TransferState& transfer,
                                                 int lane) const {
  const Queue& queue = tables_.queues[transfer.queue];
  const int64_t max_bytes = MaxBytes(transfer, tables_.lanes[lane]);
  const bool may_have_fresh = MayRelayFresh(transfer);
  for (size_t i = 0; i < transfer.returned.size(); ++i) {
    const Extent& extent = transfer.returned[i];
    const bool failed_on_direct =
        !queue.is_orphan() && extent.failed_lane == queue.direct;
    const bool may_have = queue.is_orphan() || failed_on_direct ||
                          (may_have_fresh && extent.failed_lane == kNone);
    if (may_have) {
      return {.returned = static_cast<int>(i),
              .size_bytes = std::min(max_bytes, extent.size_bytes)};
    }
  }
  const int64_t fresh = transfer.size_bytes - transfer.next_offset_bytes;
  return {.size_bytes = may_have_fresh ? std::min(max_bytes, fresh) : 0};
}

Extent BlockScheduler::Take(TransferState& transfer, const Piece& piece) {
  if (piece.returned == kNone) {
    const Extent extent = {.offset_bytes = transfer.next_offset_bytes,
                           .size_bytes = piece.size_bytes};
    transfer.next_offset_bytes += piece.size_bytes;
    return extent;
  }
  Extent& source = transfer.returned[piece.returned];
  Extent extent = source;
  extent.size_bytes = piece.size_bytes;
  source.offset_bytes += piece.size_bytes;
  source.size_bytes -= piece.size_bytes;
  if (source.size_bytes == 0) {
    source = transfer.returned.back();
    transfer.returned.pop_back();
  }
  return extent;
}

Block BlockScheduler::Issue(const Choice& choice, int64_t now_ns) {
  const int t = choice.transfer;
  TransferState& transfer = tables_.transfers[t];
  Lane& lane = tables_.lanes[choice.lane];
  HostLink& link = tables_.links[lane.host_link];
  const Extent extent = Take(transfer, choice.piece);
  const int64_t size_bytes = extent.size_bytes;

  if (free_in_flight_.empty()) {
    free_in_flight_.push_back(static_cast<int>(in_flight_.size()));
    in_flight_.emplace_back();
  }
  const int slot = free_in_flight_.back();
  free_in_flight_.pop_back();
  InFlight& in_flight = in_flight_[slot];
  in_flight = {
      .generation = in_flight.generation + 1,
      .transfer = t,
      .lane = choice.lane,
      .extent = extent,
      .issue_ns = now_ns,
      .service_ns = lane.ServiceNs(size_bytes, Stretch(tables_, lane)) +
                    lane.NextLatencyNs(),
      .cap_stretch = CapStretch(tables_, lane)};
  ++num_in_flight_;
  ++transfer.num_in_flight;

  if (lane.num_in_flight == 0) CountActive(lane, 1);
  if (lane.is_relay) {
    // What is left may now fit into the direct lane's window.
    own_marks_.Add(tables_.queues[lane.queue].host_link);
    ChargeCaps(tables_, lane, size_bytes, now_ns);
    link.relay_in_flight_bytes += size_bytes;
    link.num_borrowing += lane.num_in_flight == 0;
  } else {
    ++link.num_own_in_flight;
  }
  lane.backlog.Add(now_ns, in_flight.service_ns);
  link.backlog.Add(now_ns, link.ServiceNs(size_bytes));
  lane.in_flight_bytes += size_bytes;
  ++lane.num_in_flight;
  ++lane.num_issued_blocks;
  lane.issued_bytes += size_bytes;
  link.slot = slot_;

  const Block block = {.id = in_flight.generation << kSlotBits | slot,
                       .transfer = transfer.id,
                       .lane = choice.lane,
                       .offset_bytes = extent.offset_bytes,
                       .size_bytes = size_bytes,
                       .num_failures = extent.num_failures};
  TakeFromChunk(t, size_bytes);
  if (lane.is_relay) UpdateSharing(lane);
  if (choice.piece.returned != kNone) UpdateRelayable(t);
  MarkDeferredAround(link);
  MarkDeferred(tables_.queues[lane.queue]);
  return block;
}

void BlockScheduler::CountActive(const Lane& lane, int sign) {
  for (int c : lane.caps) {
    tables_.caps[c].active_rate += sign * lane.rate_bytes_per_s;
    if (lane.is_relay) {
      tables_.caps[c].relay_rate += sign * lane.rate_bytes_per_s;
    }
  }
}

void BlockScheduler::MarkDeferred(Queue& queue) {
  if (!queue.has_deferred) return;
  queue.has_deferred = false;
  if (queue.is_direct_deferred) own_marks_.Add(queue.host_link);
  queue.is_direct_deferred = false;
  relay_marks_.Add(queue.deferred_links);
  queue.deferred_links.Clear();
}

void BlockScheduler::MarkDeferredAround(const HostLink& link) {
  for (int q : link.queues) MarkDeferred(tables_.queues[q]);
  for (int lane : link.borrowers) {
    MarkDeferred(tables_.queues[tables_.lanes[lane].queue]);
  }
}

void BlockScheduler::MarkAll() {
  for (int link = 0; link < static_cast<int>(tables_.links.size()); ++link) {
    own_marks_.Add(link);
    relay_marks_.Add(link);
  }
}

void BlockScheduler::WakeAt(int link, int64_t at_ns) {
  timed_links_.Add(link);
  wakeup_ns_ = std::min(wakeup_ns_, at_ns);
}

}  // namespace turbobus::sched

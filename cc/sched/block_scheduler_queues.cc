#include <algorithm>

#include "sched/block_scheduler.h"
#include "sched/finish_time.h"

// Which lists a transfer stands in. A transfer with bytes to issue is in its
// queue, in order of its chunk; also among the relayable ones if relays may
// work for it; and if it is large, in line for its GPU's token.

namespace turbobus::sched {

int BlockScheduler::NewTransfer() {
  if (free_transfers_.empty()) {
    tables_.transfers.emplace_back();
    return static_cast<int>(tables_.transfers.size()) - 1;
  }
  const int t = free_transfers_.back();
  free_transfers_.pop_back();
  return t;
}

bool BlockScheduler::MayRelayFresh(const TransferState& transfer) const {
  const Queue& queue = tables_.queues[transfer.queue];
  if (queue.is_orphan()) return true;
  if (transfer.is_small) return false;
  if (!transfer.is_large || !tables_.config.has_token_gate) return true;
  const auto& token = tables_.links[queue.host_link].token;
  return !token.empty() && &tables_.transfers[token.front()] == &transfer;
}

bool BlockScheduler::MayRelay(const TransferState& transfer) const {
  if (!transfer.queued.is_linked) return false;
  if (MayRelayFresh(transfer)) return true;
  const int direct = tables_.queues[transfer.queue].direct;
  return std::any_of(transfer.returned.begin(), transfer.returned.end(),
                     [&](const Extent& e) { return e.failed_lane == direct; });
}

void BlockScheduler::InsertBySequence(int t) {
  Transfers& transfers = tables_.transfers;
  auto& relayable = tables_.queues[transfers[t].queue].relayable;
  int previous = relayable.back();
  while (previous != kNone &&
         transfers[previous].sequence > transfers[t].sequence) {
    previous = relayable.Previous(transfers, previous);
  }
  relayable.InsertAfter(transfers, t, previous);
}

void BlockScheduler::UpdateRelayable(int t) {
  TransferState& transfer = tables_.transfers[t];
  const bool may_relay = MayRelay(transfer);
  if (may_relay == transfer.relayable.is_linked) return;
  if (may_relay) {
    InsertBySequence(t);
    MarkAll();
  } else {
    tables_.queues[transfer.queue].relayable.Remove(tables_.transfers, t);
  }
  UpdateSharing(tables_.queues[transfer.queue]);
}

void BlockScheduler::UpdateSharing(Lane& lane) {
  const bool is_sharing =
      !lane.is_removed &&
      (lane.num_in_flight > 0 || !tables_.queues[lane.queue].relayable.empty());
  if (is_sharing == lane.is_sharing) return;
  lane.is_sharing = is_sharing;
  tables_.links[lane.host_link].num_sharing += is_sharing ? 1 : -1;
  // Who shares with fewer may have more in flight.
  if (!is_sharing) relay_marks_.Add(lane.host_link);
}

void BlockScheduler::UpdateSharing(const Queue& queue) {
  for (int lane : queue.relays) UpdateSharing(tables_.lanes[lane]);
}

void BlockScheduler::UpdateWaiting(Queue& queue) {
  // An orphan left the caps together with its direct lane (`DetachLane`).
  if (queue.is_orphan()) return;
  const bool is_waiting = !queue.queued.empty();
  if (is_waiting == queue.is_waiting) return;
  queue.is_waiting = is_waiting;
  tables_.links[queue.host_link].num_own_waiting += is_waiting ? 1 : -1;
  CountOwnRates(tables_);
  MarkAll();
}

void BlockScheduler::Enqueue(int t, int64_t num_bytes) {
  TransferState& transfer = tables_.transfers[t];
  Queue& queue = tables_.queues[transfer.queue];
  transfer.left_bytes += num_bytes;
  queue.queued_bytes += num_bytes;
  if (transfer.queued.is_linked) {
    transfer.chunk_left_bytes = std::min(transfer.chunk_left_bytes + num_bytes,
                                         tables_.config.chunk_bytes);
  } else {
    transfer.chunk_left_bytes =
        std::min(transfer.left_bytes, tables_.config.chunk_bytes);
    transfer.sequence = next_sequence_++;
    queue.queued.PushBack(tables_.transfers, t);
  }
  UpdateRelayable(t);
  UpdateWaiting(queue);
  own_marks_.Add(queue.host_link);
  relay_marks_.Add(queue.relay_links);
}

void BlockScheduler::Dequeue(int t) {
  TransferState& transfer = tables_.transfers[t];
  Queue& queue = tables_.queues[transfer.queue];
  queue.queued_bytes -= transfer.left_bytes;
  transfer.left_bytes = 0;
  transfer.chunk_left_bytes = 0;
  queue.queued.Remove(tables_.transfers, t);
  queue.relayable.Remove(tables_.transfers, t);
  PassToken(t);
  if (queue.relayable.empty()) UpdateSharing(queue);
  UpdateWaiting(queue);
}

void BlockScheduler::PassToken(int t) {
  TransferState& transfer = tables_.transfers[t];
  if (!transfer.token.is_linked) return;
  auto& token = tables_.links[tables_.queues[transfer.queue].host_link].token;
  const bool was_holder = token.front() == t;
  token.Remove(tables_.transfers, t);
  if (was_holder && !token.empty()) UpdateRelayable(token.front());
}

void BlockScheduler::TakeFromChunk(int t, int64_t num_bytes) {
  TransferState& transfer = tables_.transfers[t];
  Queue& queue = tables_.queues[transfer.queue];
  transfer.left_bytes -= num_bytes;
  transfer.chunk_left_bytes -= num_bytes;
  queue.queued_bytes -= num_bytes;
  if (transfer.left_bytes == 0) {
    Dequeue(t);
    return;
  }
  if (transfer.chunk_left_bytes > 0) return;
  // A chunk ends with the block that reaches its end (a block cut to fit would
  // waste a slot). The next one enters the queue behind whoever came meanwhile.
  transfer.chunk_left_bytes =
      std::min(transfer.left_bytes, tables_.config.chunk_bytes);
  transfer.sequence = next_sequence_++;
  queue.queued.Remove(tables_.transfers, t);
  queue.queued.PushBack(tables_.transfers, t);
  if (transfer.relayable.is_linked) {
    queue.relayable.Remove(tables_.transfers, t);
    queue.relayable.PushBack(tables_.transfers, t);
  }
}

void BlockScheduler::Return(int t, Extent extent) {
  tables_.transfers[t].returned.push_back(extent);
  Enqueue(t, extent.size_bytes);
}

void BlockScheduler::FinishIfDone(int t) {
  const TransferState& transfer = tables_.transfers[t];
  if (transfer.left_bytes > 0 || transfer.num_in_flight > 0) return;
  finished_.push_back(
      {.transfer = transfer.id, .is_cancelled = transfer.is_cancelled});
  Erase(t);
}

void BlockScheduler::Erase(int t) {
  slots_by_id_.erase(tables_.transfers[t].id);
  tables_.transfers[t] = {};
  free_transfers_.push_back(t);
}

void BlockScheduler::Strand(Queue& queue) {
  while (!queue.queued.empty()) {
    const int t = queue.queued.front();
    Dequeue(t);
    stranded_.push_back(tables_.transfers[t].id);
    Erase(t);
  }
}

}  // namespace turbobus::sched

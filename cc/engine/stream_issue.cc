#include "engine/stream_issue.h"

#include <algorithm>

#include "sched/split.h"

namespace turbobus::engine {
namespace {

using topo::Direction;
using transport::CopyKind;
using transport::Event;
using transport::Stream;
using transport::Streams;

class Issuer {
 public:
  Issuer(Streams& streams, IssuePlan& plan) : streams_(streams), plan_(plan) {}

  Status Run(std::vector<IssueFailure>& failures);

 private:
  /// A lane's share, block by block.
  struct Work {
    std::vector<int64_t> blocks;
    size_t next = 0;
    int64_t offset = 0;
    int64_t since_yield = 0;
    bool has_started = false;
    /// Slots whose streams have got something, where each has one.
    size_t num_slots = 0;

    bool is_over() const { return next >= blocks.size(); }
  };

  Status Start(LaneUse& use, Work& work, Stream first);
  Status IssueDirect();
  Status IssueRelay(size_t relay);
  Status IssueOnLegs(size_t relay);
  Status IssueOnSlot(size_t relay);
  Status MaybeYield(LaneUse& use, Work& work, Stream stream, int64_t bytes);
  Status MarkHop(const LaneUse& use, Stream stream, Event& hop);
  Status Mark(LaneUse& use, Stream stream, int64_t offset, int64_t bytes,
              Event hop = nullptr);
  Status TakeOver(size_t relay, IssueFailure& failure);
  Status EndRound();
  Status RecordEnds();
  Status RecordEnd(LaneUse& use, Work& work, Stream first, Stream last);
  Status RecordSlotsEnd(size_t relay);

  LaneUse& UseOf(size_t relay) { return plan_.flight->uses[relay + 1]; }
  /// Across PCIe.
  CopyKind kind() const { return is_h2d() ? CopyKind::kH2d : CopyKind::kD2h; }
  bool is_h2d() const { return plan_.flight->direction == Direction::kH2d; }
  static Stream First(const RelaySlot& slot, bool is_h2d) {
    return is_h2d ? slot.pcie : slot.fabric;
  }
  static Stream Second(const RelaySlot& slot, bool is_h2d) {
    return is_h2d ? slot.fabric : slot.pcie;
  }

  Streams& streams_;
  IssuePlan& plan_;
  Work direct_;
  std::vector<Work> relays_;
};

Status Issuer::Start(LaneUse& use, Work& work, Stream first) {
  if (work.has_started) return OkStatus();
  work.has_started = true;
  if (first != plan_.flight->stream) {
    TB_RETURN_IF_ERROR(streams_.Wait(first, plan_.flight->begin));
  }
  return streams_.Record(use.link_gpu, use.start, first);
}

Status Issuer::MaybeYield(LaneUse& use, Work& work, Stream stream,
                          int64_t bytes) {
  work.since_yield += bytes;
  if (plan_.yield_bytes <= 0 || work.is_over() ||
      work.since_yield < plan_.yield_bytes) {
    return OkStatus();
  }
  work.since_yield = 0;
  return streams_.Yield(use.link_gpu, stream);
}

Status Issuer::MarkHop(const LaneUse& use, Stream stream, Event& hop) {
  if (!plan_.make_mark) return OkStatus();
  TB_ASSIGN_OR_RETURN(hop, plan_.make_mark(use.link_gpu));
  return streams_.Record(use.link_gpu, hop, stream);
}

Status Issuer::Mark(LaneUse& use, Stream stream, int64_t offset, int64_t bytes,
                    Event hop) {
  ++use.num_blocks;
  if (!plan_.make_mark) return OkStatus();
  TB_ASSIGN_OR_RETURN(const Event end, plan_.make_mark(use.link_gpu));
  use.marks.push_back({offset, bytes, end, hop});
  return streams_.Record(use.link_gpu, end, stream);
}

Status Issuer::IssueDirect() {
  const Flight& flight = *plan_.flight;
  LaneUse& use = plan_.flight->uses[0];
  const Stream stream = plan_.direct_stream;
  TB_RETURN_IF_ERROR(Start(use, direct_, stream));
  const int64_t bytes = direct_.blocks[direct_.next];
  TB_RETURN_IF_ERROR(streams_.Copy(stream, flight.dst + direct_.offset,
                                   flight.src + direct_.offset, bytes, kind()));
  TB_RETURN_IF_ERROR(Mark(use, stream, direct_.offset, bytes));
  ++direct_.next;
  direct_.offset += bytes;
  return MaybeYield(use, direct_, stream, bytes);
}

Status Issuer::IssueRelay(size_t relay) {
  return plan_.relay_streams == RelayStreams::kPerLeg ? IssueOnLegs(relay)
                                                      : IssueOnSlot(relay);
}

Status Issuer::IssueOnLegs(size_t relay) {
  const Flight& flight = *plan_.flight;
  IssuePlan::Relay& lane = plan_.relays[relay];
  Work& work = relays_[relay];
  LaneUse& use = UseOf(relay);
  const Stream first = First(*lane.slots[0], is_h2d());
  const Stream second = Second(*lane.slots[0], is_h2d());
  RelaySlot& slot = *lane.slots[work.next % lane.slots.size()];
  const int64_t bytes = work.blocks[work.next];

  TB_RETURN_IF_ERROR(Start(use, work, first));
  if (lane.has_fault && work.next >= 1) return Unavailable("injected fault");
  if (slot.was_used) TB_RETURN_IF_ERROR(streams_.Wait(first, slot.free));
  TB_RETURN_IF_ERROR(streams_.Copy(first, slot.buffer, flight.src + work.offset,
                                   bytes, is_h2d() ? kind() : CopyKind::kD2d));
  Event hop = nullptr;
  TB_RETURN_IF_ERROR(MarkHop(use, first, hop));
  TB_RETURN_IF_ERROR(streams_.Record(use.link_gpu, slot.full, first));
  TB_RETURN_IF_ERROR(streams_.Wait(second, slot.full));
  TB_RETURN_IF_ERROR(streams_.Copy(second, flight.dst + work.offset,
                                   slot.buffer, bytes,
                                   is_h2d() ? CopyKind::kD2d : kind()));
  TB_RETURN_IF_ERROR(streams_.Record(use.link_gpu, slot.free, second));
  slot.was_used = true;
  const int64_t offset = work.offset;
  ++work.next;
  work.offset += bytes;
  TB_RETURN_IF_ERROR(Mark(use, second, offset, bytes, hop));
  return MaybeYield(use, work, lane.slots[0]->pcie, bytes);
}

Status Issuer::IssueOnSlot(size_t relay) {
  const Flight& flight = *plan_.flight;
  IssuePlan::Relay& lane = plan_.relays[relay];
  Work& work = relays_[relay];
  LaneUse& use = UseOf(relay);
  const size_t index = work.next % lane.slots.size();
  RelaySlot& slot = *lane.slots[index];
  const Stream stream = slot.pcie;
  const int64_t bytes = work.blocks[work.next];

  TB_RETURN_IF_ERROR(Start(use, work, lane.slots[0]->pcie));
  if (lane.has_fault && work.next >= 1) return Unavailable("injected fault");
  if (index >= work.num_slots) {
    work.num_slots = index + 1;
    if (index > 0) TB_RETURN_IF_ERROR(streams_.Wait(stream, flight.begin));
    // Of a transfer that had the slot on other streams.
    if (slot.was_used) TB_RETURN_IF_ERROR(streams_.Wait(stream, slot.free));
  }
  const auto cross_pcie = [&](void* dst, const void* src) {
    const bool is_chained =
        plan_.relay_streams == RelayStreams::kPerSlot && lane.slots.size() > 1;
    if (is_chained && work.next > 0) {
      TB_RETURN_IF_ERROR(streams_.Wait(stream, lane.slots[1 - index]->full));
    }
    TB_RETURN_IF_ERROR(streams_.Copy(stream, dst, src, bytes, kind()));
    return is_chained ? streams_.Record(use.link_gpu, slot.full, stream)
                      : OkStatus();
  };
  const std::byte* const src = flight.src + work.offset;
  std::byte* const dst = flight.dst + work.offset;
  Event hop = nullptr;
  if (is_h2d()) {
    TB_RETURN_IF_ERROR(cross_pcie(slot.buffer, src));
    TB_RETURN_IF_ERROR(MarkHop(use, stream, hop));
    TB_RETURN_IF_ERROR(
        streams_.Copy(stream, dst, slot.buffer, bytes, CopyKind::kD2d));
  } else {
    TB_RETURN_IF_ERROR(
        streams_.Copy(stream, slot.buffer, src, bytes, CopyKind::kD2d));
    TB_RETURN_IF_ERROR(MarkHop(use, stream, hop));
    TB_RETURN_IF_ERROR(cross_pcie(dst, slot.buffer));
  }
  const int64_t offset = work.offset;
  ++work.next;
  work.offset += bytes;
  return Mark(use, stream, offset, bytes, hop);
}

/// The direct lane goes on from the block that was refused. Where its bytes are
/// on their way all the same, they are the same bytes.
Status Issuer::TakeOver(size_t relay, IssueFailure& failure) {
  const Flight& flight = *plan_.flight;
  const Stream stream = plan_.direct_stream;
  LaneUse& use = plan_.flight->uses[0];
  Work& work = relays_[relay];
  TB_RETURN_IF_ERROR(Start(use, direct_, stream));
  while (!work.is_over()) {
    const int64_t offset = work.offset;
    const int64_t bytes = work.blocks[work.next++];
    work.offset += bytes;
    TB_RETURN_IF_ERROR(streams_.Copy(stream, flight.dst + offset,
                                     flight.src + offset, bytes, kind()));
    use.bytes += bytes;
    UseOf(relay).bytes -= bytes;
    ++failure.num_blocks;
    TB_RETURN_IF_ERROR(Mark(use, stream, offset, bytes));
  }
  return OkStatus();
}

/// Every lane waits for what every other one has issued so far.
Status Issuer::EndRound() {
  struct Leg {
    int gpu;
    Stream stream;
    Event round;
  };
  std::vector<Leg> legs;
  if (direct_.has_started) {
    legs.push_back(
        {plan_.flight->gpu, plan_.direct_stream, plan_.direct_round});
  }
  for (size_t i = 0; i < plan_.relays.size(); ++i) {
    if (!relays_[i].has_started) continue;
    const RelaySlot& slot = *plan_.relays[i].slots[0];
    legs.push_back({UseOf(i).link_gpu, slot.pcie, slot.round});
  }
  for (const Leg& leg : legs) {
    TB_RETURN_IF_ERROR(streams_.Record(leg.gpu, leg.round, leg.stream));
  }
  for (const Leg& leg : legs) {
    for (const Leg& other : legs) {
      if (&leg == &other) continue;
      TB_RETURN_IF_ERROR(streams_.Wait(leg.stream, other.round));
    }
  }
  return OkStatus();
}

Status Issuer::RecordEnds() {
  // A lane that got no block has an end as well: whoever waits for it must find
  // it recorded.
  Status result = RecordEnd(plan_.flight->uses[0], direct_, plan_.direct_stream,
                            plan_.direct_stream);
  for (size_t i = 0; i < plan_.relays.size(); ++i) {
    const RelaySlot& slot = *plan_.relays[i].slots[0];
    const Status status =
        plan_.relay_streams == RelayStreams::kPerLeg
            ? RecordEnd(UseOf(i), relays_[i], First(slot, is_h2d()),
                        Second(slot, is_h2d()))
            : RecordSlotsEnd(i);
    if (result.ok()) result = status;
  }
  return result;
}

Status Issuer::RecordEnd(LaneUse& use, Work& work, Stream first, Stream last) {
  TB_RETURN_IF_ERROR(Start(use, work, first));
  if (first != last) {
    // Covers a first leg whose second was refused.
    TB_RETURN_IF_ERROR(streams_.Record(use.link_gpu, use.end, first));
    TB_RETURN_IF_ERROR(streams_.Wait(last, use.end));
  }
  return streams_.Record(use.link_gpu, use.end, last);
}

Status Issuer::RecordSlotsEnd(size_t relay) {
  const IssuePlan::Relay& lane = plan_.relays[relay];
  Work& work = relays_[relay];
  LaneUse& use = UseOf(relay);
  // The stream of the last block: it ends last.
  const size_t last = work.next == 0 ? 0 : (work.next - 1) % lane.slots.size();
  const Stream stream = lane.slots[last]->pcie;
  TB_RETURN_IF_ERROR(Start(use, work, lane.slots[0]->pcie));
  for (size_t i = 0; i < work.num_slots; ++i) {
    RelaySlot& slot = *lane.slots[i];
    TB_RETURN_IF_ERROR(streams_.Record(use.link_gpu, slot.free, slot.pcie));
    slot.was_used = true;
    if (i != last) TB_RETURN_IF_ERROR(streams_.Wait(stream, slot.free));
  }
  return streams_.Record(use.link_gpu, use.end, stream);
}

Status Issuer::Run(std::vector<IssueFailure>& failures) {
  direct_.blocks =
      sched::CutBlocks(plan_.direct_bytes, plan_.direct_block_bytes, false);
  int64_t offset = plan_.direct_bytes;
  relays_.resize(plan_.relays.size());
  for (size_t i = 0; i < plan_.relays.size(); ++i) {
    Work& work = relays_[i];
    work.blocks =
        sched::CutBlocks(plan_.relays[i].bytes, plan_.relay_block_bytes, true);
    // The second leg of the last block, and the first leg of the first one, are
    // hidden by nothing: whichever is the fabric's is short anyway.
    if (!is_h2d()) std::ranges::reverse(work.blocks);
    work.offset = offset;
    offset += plan_.relays[i].bytes;
  }
  Status status;
  bool is_over = false;
  while (!is_over && status.ok()) {
    is_over = true;
    if (!direct_.is_over()) {
      is_over = false;
      status = IssueDirect();
    }
    for (size_t i = 0; i < relays_.size() && status.ok(); ++i) {
      Work& work = relays_[i];
      if (work.is_over()) continue;
      is_over = false;
      const Status refused = IssueRelay(i);
      if (refused.ok()) continue;
      failures.push_back({i, refused});
      status = TakeOver(i, failures.back());
    }
    if (plan_.is_lock_step && !is_over && status.ok()) status = EndRound();
  }
  const Status ended = RecordEnds();
  return status.ok() ? ended : status;
}

}  // namespace

Status Issue(Streams& streams, IssuePlan& plan,
             std::vector<IssueFailure>& failures) {
  return Issuer(streams, plan).Run(failures);
}

}  // namespace turbobus::engine

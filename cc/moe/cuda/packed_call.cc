#include "moe/cuda/packed_call.h"

#include <algorithm>
#include <utility>

#include "moe/cuda/known_totals.h"
#include "moe/cuda/total_faults.h"

namespace turbobus::moe::cuda {
namespace {

/// Values that ranks swap where rows go by ring: an address, then how many rows
/// each peer has of this rank's tokens.
constexpr int kAddress = 0;
constexpr int kFirstTotal = 1;

/// Rows are unpacked and added up while more come, in so many parts.
constexpr int64_t kLeastPartBytes = 4 << 20;
constexpr int64_t kMostParts = 4;

}  // namespace

PackedCall::~PackedCall() {
  if (mail_ == nullptr) return;
  auto event = EventPool::Process().Record(caller_.device, caller_.stream);
  // Without an event the device is lost, and nobody will read or write.
  if (!event.ok()) return;
  mail_->AddUser(*event);
  for (Mail* const mail : mails_) {
    if (mail != mail_.get()) mail->AddUser(*event);
  }
}

Peers<const int32_t> PackedCall::Tables(int64_t offset,
                                        const int32_t* own) const {
  Peers<const int32_t> peers;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    peers.of[r] = r == shape_.rank ? own
                  : layout_.is_mailed
                      ? In<const int32_t>(r, offset)
                      : reinterpret_cast<const int32_t*>(
                            scratch_.tables + r * layout_.table_bytes +
                            (offset - layout_.first_table()));
  }
  return peers;
}

Peers<const void> PackedCall::Weights() const {
  Peers<const void> peers;
  if (own_.weights == nullptr) return peers;
  const Peers<const int32_t> tables =
      Tables(layout_.weights, static_cast<const int32_t*>(own_.weights));
  for (int r = 0; r < shape_.num_ranks; ++r) peers.of[r] = tables.of[r];
  return peers;
}

int64_t PackedCall::Total(int tokens_of, int rows_on) const {
  return static_cast<int64_t>(visit_.Value(tokens_of, kFirstTotal + rows_on));
}

Boxes PackedCall::Numbered(uint8_t* rows, const int32_t* index) const {
  return {.of = SameForAll(rows), .index = index};
}

Status PackedCall::Begin() {
  TB_RETURN_IF_ERROR(visit_.Check(TotalFaults::Process().Take(caller_.device)));
  auto mail = MailPool::Process().Take(layout_.mail_bytes, caller_.stream);
  if (!mail.ok()) return visit_.Check(mail.status());
  mail_ = *std::move(mail);
  return OkStatus();
}

Status PackedCall::SwapMail() {
  std::vector<uint64_t> values = {reinterpret_cast<uint64_t>(mail_.get()),
                                  totals_ != nullptr};
  for (int r = 0; r < shape_.num_ranks; ++r) {
    values.push_back(totals_ != nullptr ? totals_.get()[r] : 0);
  }
  TB_RETURN_IF_ERROR(visit_.MeetWith(std::move(values), mail_));
  all_know_ = true;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    mails_.push_back(reinterpret_cast<Mail*>(visit_.Value(r, 0)));
    all_know_ = all_know_ && visit_.Value(r, 1) != 0;
    for (int p = 0; p < shape_.num_ranks; ++p) {
      early_totals_.push_back(static_cast<int64_t>(visit_.Value(r, 2 + p)));
    }
  }
  begun_ = visit_.EventOf(shape_.rank);
  return OkStatus();
}

Status PackedCall::PostTables() {
  const int64_t num_slots = layout_.num_slots();
  uint8_t* const mail = mail_->data();
  WordCopies copies;
  copies.Add(own_.expert_ids, mail + layout_.ids, num_slots);
  copies.Add(own_.positions, mail + layout_.positions, num_slots);
  if (own_.weights != nullptr) {
    copies.Add(own_.weights, mail + layout_.weights,
               num_slots * layout_.weight_words);
  }
  return Check(LaunchWordCopies(copies, caller_.stream), "table kernel");
}

Status PackedCall::ReadTables() {
  if (layout_.is_mailed) return OkStatus();
  for (int r = 0; r < shape_.num_ranks; ++r) {
    if (r == shape_.rank) continue;
    TB_RETURN_IF_ERROR(Check(
        cudaMemcpyAsync(scratch_.tables + r * layout_.table_bytes,
                        In<uint8_t>(r, layout_.first_table()),
                        layout_.table_bytes, cudaMemcpyDefault, caller_.stream),
        "copy of a peer's tables"));
  }
  return OkStatus();
}

void PackedCall::Recall(const int32_t* slots) {
  const auto record =
      KnownTotals::Process().Find({caller_.device, caller_.key.run_id, slots},
                                  shape_, caller_.wiring.devices);
  if (!record.has_value()) return;
  totals_ = record->totals;
}

Status PackedCall::RecallEarly(const void* early) {
  const auto record =
      KnownTotals::Early().Find({caller_.device, caller_.key.run_id, early},
                                shape_, caller_.wiring.devices);
  if (!record.has_value()) return OkStatus();
  if (record->counted == nullptr) {
    totals_ = record->totals;
    return OkStatus();
  }
  TB_RETURN_IF_ERROR(visit_.AwaitOnHost(record->counted));
  KeepTotals(record->totals.get());
  // Another start may have the same ids; the mail has done its part.
  KnownTotals::Early().Put(
      {caller_.device, caller_.key.run_id, early},
      {.shape = shape_, .devices = caller_.wiring.devices, .totals = totals_});
  return OkStatus();
}

void PackedCall::KeepTotals(const int32_t* pinned) {
  auto totals =
      std::make_shared<std::vector<int32_t>>(pinned, pinned + shape_.num_ranks);
  totals_ = {totals, totals->data()};
}

void PackedCall::Remember(const int32_t* slots) {
  KnownTotals::Process().Put(
      {caller_.device, caller_.key.run_id, slots},
      {.shape = shape_, .devices = caller_.wiring.devices, .totals = totals_});
}

void PackedCall::Forget(const int32_t* slots) {
  KnownTotals::Process().Forget({caller_.device, caller_.key.run_id, slots});
}

Status PackedCall::SwapTotals(const void* address) {
  if (totals_ == nullptr) {
    TB_RETURN_IF_ERROR(visit_.AwaitOnHost(counted_));
    KeepTotals(
        reinterpret_cast<const int32_t*>(mail_->data() + layout_.totals));
  }
  std::vector<uint64_t> values = {reinterpret_cast<uint64_t>(address)};
  for (int r = 0; r < shape_.num_ranks; ++r) {
    values.push_back(totals_.get()[r]);
  }
  values.push_back(summed_.size());
  for (const SharedEvent& event : summed_) {
    values.push_back(reinterpret_cast<uint64_t>(event.get()));
  }
  return visit_.MeetWith(
      std::move(values),
      std::make_shared<std::vector<SharedEvent>>(std::move(summed_)));
}

std::vector<cudaEvent_t> PackedCall::ReadyEventsOf(int rank) const {
  const int first = kFirstTotal + shape_.num_ranks;
  const auto count = static_cast<int>(visit_.Value(rank, first));
  std::vector<cudaEvent_t> events;
  for (int i = 0; i < count; ++i) {
    events.push_back(
        reinterpret_cast<cudaEvent_t>(visit_.Value(rank, first + 1 + i)));
  }
  events.push_back(visit_.EventOf(rank));
  return events;
}

Status PackedCall::SumForPeers(DType dtype, CombineArgs& args) {
  const auto sum = [&] {
    return Check(LaunchPartial(shape_, dtype, args, caller_.stream),
                 "partial-sum kernel");
  };
  int64_t most = 0;
  if (all_know_) {
    for (int r = 0; r < shape_.num_ranks; ++r) {
      if (r == shape_.rank) continue;
      most = std::max(most, EarlyTotal(r, shape_.rank) * shape_.row_bytes);
    }
  }
  const int64_t num_parts =
      std::clamp<int64_t>(most / kLeastPartBytes, 1, kMostParts);
  if (num_parts == 1) return sum();
  args.leaving.is_all = false;
  for (int64_t part = 0; part < num_parts; ++part) {
    int64_t first = 0;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      if (r == shape_.rank) continue;
      const int64_t rows = EarlyTotal(r, shape_.rank);
      args.leaving.begin[r] = args.leaving.end[r];
      if (part == 0) args.leaving.begin[r] = static_cast<int32_t>(first);
      args.leaving.end[r] =
          static_cast<int32_t>(first + rows * (part + 1) / num_parts);
      first += rows;
    }
    TB_RETURN_IF_ERROR(sum());
    if (part + 1 == num_parts) break;
    TB_ASSIGN_OR_RETURN(summed_.emplace_back(), visit_.Mark());
  }
  return OkStatus();
}

Status PackedCall::PullRows(bool is_forward) {
  const int me = shape_.rank;
  int64_t own_row = 0;
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    if (peer == me) continue;
    // Packed rows are ordered by peer: the tokens' rank, or that of the rows.
    int64_t peer_row = 0;
    for (int r = 0; r < me; ++r) {
      if (r == peer) continue;
      peer_row += is_forward ? Total(peer, r) : Total(r, peer);
    }
    const int64_t num_rows = is_forward ? Total(peer, me) : Total(me, peer);
    const auto* const packed =
        reinterpret_cast<const uint8_t*>(visit_.Value(peer, kAddress));
    TB_RETURN_IF_ERROR(
        transfers_.Add({.peer = peer,
                        .from = packed + peer_row * shape_.row_bytes,
                        .to = scratch_.inbox + own_row * shape_.row_bytes,
                        .num_rows = num_rows,
                        .row_bytes = shape_.row_bytes},
                       ReadyEventsOf(peer), begun_));
    own_row += num_rows;
  }
  return transfers_.Start(kMostParts, kLeastPartBytes);
}

Status PackedCall::ForParts(const std::function<Status(const Arrived&)>& use) {
  const std::span<const Transfer> transfers = transfers_.transfers();
  if (transfers.empty()) return use({});
  Arrived arrived;
  arrived.is_all = false;
  const auto row_of = [&](const Transfer& transfer, int64_t bytes) {
    return static_cast<int32_t>((transfer.to[0] - scratch_.inbox + bytes) /
                                shape_.row_bytes);
  };
  for (const Transfer& transfer : transfers) {
    arrived.end[transfer.peer] = row_of(transfer, 0);
  }
  for (int part = 0; part < transfers_.num_parts(); ++part) {
    arrived.is_first = part == 0;
    TB_RETURN_IF_ERROR(transfers_.AwaitPart(part));
    for (const Transfer& transfer : transfers) {
      const int peer = transfer.peer;
      arrived.begin[peer] = arrived.end[peer];
      arrived.end[peer] = row_of(transfer, transfer.parts[part].end);
    }
    TB_RETURN_IF_ERROR(use(arrived));
  }
  return OkStatus();
}

Status PackedCall::PushTokens(const uint8_t* tokens) {
  std::vector<uint8_t*> to;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    to.push_back(reinterpret_cast<uint8_t*>(visit_.Value(r, kAddress)) +
                 layout_.InboxOf(r, shape_.rank) * shape_.row_bytes);
  }
  return transfers_.Push(tokens, shape_.num_tokens * shape_.row_bytes, to);
}

Status PackedCall::NumberTokens(bool is_outgoing) {
  NumberArgs args = {
      .expert_ids = Tables(layout_.ids, own_.expert_ids),
      .positions = Tables(layout_.positions, own_.positions),
      .is_outgoing = is_outgoing,
      .index = is_outgoing ? scratch_.own_index : scratch_.peer_index,
      .block_counts = scratch_.number_blocks,
      // The host has to know how many rows it has for others.
      .totals = is_outgoing
                    ? reinterpret_cast<int32_t*>(mail_->data() + layout_.totals)
                    : scratch_.peer_totals,
  };
  if (is_outgoing && totals_ != nullptr) {
    std::copy_n(totals_.get(), shape_.num_ranks, args.told);
    args.fault = TotalFaults::Process().Of(caller_.device);
  }
  TB_RETURN_IF_ERROR(
      Check(LaunchNumber(shape_, args, caller_.stream), "number kernel"));
  if (!is_outgoing || totals_ != nullptr) return OkStatus();
  TB_ASSIGN_OR_RETURN(counted_, visit_.Mark());
  return OkStatus();
}

}  // namespace turbobus::moe::cuda

#include "moe/cuda/packed_exchange.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "moe/cuda/cutter.h"
#include "moe/cuda/mail.h"
#include "moe/cuda/packed_layout.h"
#include "moe/cuda/transfer.h"
#include "moe/cuda/visit.h"

namespace turbobus::moe::cuda {
namespace {

/// Values that ranks swap where rows go by ring: an address, then how many rows
/// each peer has of this rank's tokens.
constexpr int kAddress = 0;
constexpr int kFirstTotal = 1;

/// Rows are unpacked and added up while more come, in so many parts.
constexpr int64_t kLeastPartBytes = 4 << 20;
constexpr int64_t kMostParts = 4;

/// One rank's call. Whatever is enqueued on streams of rings is over before the
/// caller's stream passes the call.
class PackedCall {
 public:
  PackedCall(const Caller& caller, const PackedLayout& layout, void* scratch)
      : caller_(caller),
        shape_(layout.shape),
        layout_(layout),
        scratch_(layout, scratch),
        visit_(caller) {}
  ~PackedCall();
  PackedCall(const PackedCall&) = delete;
  PackedCall& operator=(const PackedCall&) = delete;

  Status Dispatch(const GpuDispatch& call);
  Status Combine(const GpuCombine& call);
  Status CombineGrad(const GpuCombineGrad& call);

 private:
  Status TakeMail();
  /// Meets; then every rank's mail is known and holds what was enqueued before.
  Status SwapMail();
  /// Copies this rank's tables into its mail.
  Status PostTables();
  /// Makes the peers' tables readable: in mail, or on the device.
  Status ReadTables();
  /// Numbers this rank's tokens for the peers, or theirs for it.
  Status NumberTokens(bool is_outgoing);
  /// Meets where the host knows how many of this rank's rows there are.
  Status SwapTotals(const SharedEvent& counted, const void* address);

  /// The host's part of a ring transfer: from each peer's packed rows into this
  /// rank's. `is_forward`: rows of the peers' tokens; else of this rank's.
  Status PullRows(bool is_forward);
  /// Calls `use` for each part of the pulled rows, on which the caller's stream
  /// has then waited.
  Status ForParts(const std::function<Status(const Arrived&)>& use);
  /// Makes the caller's stream wait for all that is pulled.
  Status AwaitReceived();
  /// Every token of this rank into every peer's inbox.
  Status PushTokens(const uint8_t* tokens);
  /// Meets; then nobody reads this rank's memory any more, and the caller's
  /// stream has what it was sent.
  Status EndTransfers();

  Status BroadcastDispatch(const GpuDispatch& call);
  Status RingDispatch(const GpuDispatch& call);
  Status MailDispatch(const GpuDispatch& call);
  Status Pack(const GpuDispatch& call, const Boxes& outbox, bool for_peers,
              bool for_own);
  Status Unpack(const GpuDispatch& call, const Boxes& inbox,
                const Arrived& arrived = {});

  template <typename T>
  T* In(int rank, int64_t offset) const {
    return reinterpret_cast<T*>(mails_[rank]->data() + offset);
  }
  template <typename T>
  Peers<T> InAll(int64_t offset) const {
    Peers<T> peers;
    for (int r = 0; r < shape_.num_ranks; ++r) peers.of[r] = In<T>(r, offset);
    return peers;
  }
  /// A table of every rank; `offset`: its place in mail; `own`: this rank's.
  Peers<const int32_t> Tables(int64_t offset, const int32_t* own) const;
  Peers<const void> Weights() const;
  template <typename T>
  Peers<T> SameForAll(T* pointer) const;
  /// The same box for all peers, rows numbered by `index`.
  Boxes Numbered(uint8_t* rows, const int32_t* index) const;

  /// Rows that the tokens of one rank have on another, one each.
  int64_t Total(int tokens_of, int rows_on) const {
    return static_cast<int64_t>(visit_.Value(tokens_of, kFirstTotal + rows_on));
  }
  Status Check(cudaError_t error, const char* what) {
    return visit_.Check(error, what);
  }
  Status Wait(cudaEvent_t event) {
    return visit_.Check(cudaStreamWaitEvent(caller_.stream, event, 0),
                        "cudaStreamWaitEvent");
  }

  const Caller& caller_;
  const Shape shape_;
  const PackedLayout layout_;
  const PackedScratch scratch_;
  Visit visit_;
  struct {
    const int32_t* expert_ids = nullptr;
    const int32_t* positions = nullptr;
    const void* weights = nullptr;
  } own_;  // This rank's tables.
  std::shared_ptr<Mail> mail_;
  std::vector<Mail*> mails_;  // By rank; `visit_` keeps them.
  std::vector<Transfer> transfers_;
  int num_parts_ = 1;
};

PackedCall::~PackedCall() {
  // After an error what was sent here may still be on its way.
  (void)AwaitReceived();
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

template <typename T>
Peers<T> PackedCall::SameForAll(T* pointer) const {
  Peers<T> peers;
  for (int r = 0; r < shape_.num_ranks; ++r) peers.of[r] = pointer;
  return peers;
}

Boxes PackedCall::Numbered(uint8_t* rows, const int32_t* index) const {
  return {.of = SameForAll(rows), .index = index};
}

Status PackedCall::TakeMail() {
  auto mail = MailPool::Process().Take(layout_.mail_bytes, caller_.stream);
  if (!mail.ok()) return visit_.Check(mail.status());
  mail_ = *std::move(mail);
  return OkStatus();
}

Status PackedCall::SwapMail() {
  TB_RETURN_IF_ERROR(
      visit_.MeetWith({reinterpret_cast<uint64_t>(mail_.get())}, mail_));
  for (int r = 0; r < shape_.num_ranks; ++r) {
    mails_.push_back(reinterpret_cast<Mail*>(visit_.Value(r, 0)));
  }
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

Status PackedCall::SwapTotals(const SharedEvent& counted, const void* address) {
  TB_RETURN_IF_ERROR(visit_.AwaitOnHost(counted));
  std::vector<uint64_t> values = {reinterpret_cast<uint64_t>(address)};
  const auto* totals =
      reinterpret_cast<const int32_t*>(mail_->data() + layout_.totals);
  for (int r = 0; r < shape_.num_ranks; ++r) values.push_back(totals[r]);
  return visit_.MeetWith(std::move(values), nullptr);
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
    if (num_rows > 0) {
      auto ring = RingPool::Process().Take(caller_.wiring.devices[peer],
                                           {caller_.device},
                                           caller_.wiring.Between(peer, me));
      if (!ring.ok()) return visit_.Check(ring.status());
      const cudaEvent_t own_ready = visit_.EventOf(me);
      TB_RETURN_IF_ERROR(
          visit_.Check((*ring)->Await(visit_.EventOf(peer), {&own_ready, 1})));
      Transfer& transfer = transfers_.emplace_back();
      transfer.peer = peer;
      transfer.from =
          reinterpret_cast<const uint8_t*>(visit_.Value(peer, kAddress)) +
          peer_row * shape_.row_bytes;
      transfer.to = {scratch_.inbox + own_row * shape_.row_bytes};
      transfer.size_bytes = num_rows * shape_.row_bytes;
      transfer.ring = *std::move(ring);
    }
    own_row += num_rows;
  }
  int64_t most = 0;
  for (const Transfer& transfer : transfers_) {
    most = std::max(most, transfer.size_bytes);
  }
  num_parts_ = static_cast<int>(
      std::clamp<int64_t>(most / kLeastPartBytes, 1, kMostParts));
  for (Transfer& transfer : transfers_) transfer.num_parts = num_parts_;
  const Status status = Enqueue(transfers_);
  if (status.ok()) return OkStatus();
  (void)AwaitReceived();
  return visit_.Check(status);
}

Status PackedCall::AwaitReceived() {
  for (const Transfer& transfer : transfers_) {
    for (const SharedEvent& event : transfer.received) {
      TB_RETURN_IF_ERROR(Wait(event.get()));
    }
  }
  return OkStatus();
}

Status PackedCall::ForParts(const std::function<Status(const Arrived&)>& use) {
  Arrived arrived;
  arrived.is_all = false;
  int64_t first_row[kMaxRanks] = {};
  for (const Transfer& transfer : transfers_) {
    first_row[transfer.peer] =
        (transfer.to[0] - scratch_.inbox) / shape_.row_bytes;
    arrived.end[transfer.peer] = static_cast<int32_t>(first_row[transfer.peer]);
  }
  for (int part = 0; part < num_parts_; ++part) {
    arrived.is_first = part == 0;
    for (const Transfer& transfer : transfers_) {
      const Transfer::Part& here = transfer.parts[part];
      TB_RETURN_IF_ERROR(Wait(here.event.get()));
      const int peer = transfer.peer;
      arrived.begin[peer] = arrived.end[peer];
      arrived.end[peer] =
          static_cast<int32_t>(first_row[peer] + here.end / shape_.row_bytes);
    }
    TB_RETURN_IF_ERROR(use(arrived));
  }
  return OkStatus();
}

Status PackedCall::PushTokens(const uint8_t* tokens) {
  Transfer& transfer = transfers_.emplace_back();
  std::vector<int> readers;
  std::vector<cudaEvent_t> ready;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    if (r == shape_.rank) continue;
    readers.push_back(caller_.wiring.devices[r]);
    ready.push_back(visit_.EventOf(r));
    transfer.to.push_back(
        reinterpret_cast<uint8_t*>(visit_.Value(r, kAddress)) +
        layout_.InboxOf(r, shape_.rank) * shape_.row_bytes);
  }
  if (readers.empty()) {
    transfers_.clear();
    return OkStatus();
  }
  transfer.from = tokens;
  transfer.size_bytes = shape_.num_tokens * shape_.row_bytes;
  auto ring = RingPool::Process().Take(caller_.device, std::move(readers),
                                       {.kind = Path::Kind::kHost});
  if (!ring.ok()) return visit_.Check(ring.status());
  transfer.ring = *std::move(ring);
  TB_RETURN_IF_ERROR(
      visit_.Check(transfer.ring->Await(visit_.EventOf(shape_.rank), ready)));
  const Status status = Enqueue(transfers_);
  if (transfer.sent != nullptr) {
    TB_RETURN_IF_ERROR(Wait(transfer.sent.get()));
  }
  return visit_.Check(status);
}

Status PackedCall::EndTransfers() {
  // By rank: the event after which its memory is not read, or it has all.
  std::vector<uint64_t> values(shape_.num_ranks);
  auto keep = std::make_shared<std::vector<SharedEvent>>();
  for (Transfer& transfer : transfers_) {
    if (layout_.is_broadcast) {
      for (size_t i = 0; i < transfer.received.size(); ++i) {
        const int reader = static_cast<int>(i);
        values[reader + (reader >= shape_.rank ? 1 : 0)] =
            reinterpret_cast<uint64_t>(transfer.received[i].get());
        keep->push_back(transfer.received[i]);
      }
    } else {
      values[transfer.peer] = reinterpret_cast<uint64_t>(transfer.sent.get());
      keep->push_back(transfer.sent);
    }
  }
  transfers_.clear();
  TB_RETURN_IF_ERROR(visit_.MeetWith(std::move(values), std::move(keep)));
  for (int r = 0; r < shape_.num_ranks; ++r) {
    auto* const event =
        reinterpret_cast<cudaEvent_t>(visit_.Value(r, shape_.rank));
    if (event != nullptr) TB_RETURN_IF_ERROR(Wait(event));
  }
  return OkStatus();
}

Status PackedCall::NumberTokens(bool is_outgoing) {
  const NumberArgs args = {
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
  return Check(LaunchNumber(shape_, args, caller_.stream), "number kernel");
}

Status PackedCall::Dispatch(const GpuDispatch& call) {
  own_ = {call.expert_ids, call.slots, nullptr};
  TB_RETURN_IF_ERROR(TakeMail());
  uint8_t* const mail = mail_->data();
  TB_RETURN_IF_ERROR(
      Check(LaunchPlan(shape_, call.expert_ids,
                       reinterpret_cast<int32_t*>(mail + layout_.counts),
                       scratch_.block_offsets, caller_.stream),
            "plan kernel"));
  TB_RETURN_IF_ERROR(SwapMail());
  PositionsArgs args = {
      .counts = InAll<const int32_t>(layout_.counts),
      .expert_ids = call.expert_ids,
      .block_offsets = scratch_.block_offsets,
      .positions = call.slots,
      .group_sizes = call.group_sizes,
      .wanted = call.wanted,
      .posted_ids = reinterpret_cast<int32_t*>(mail + layout_.ids),
      .posted_positions = reinterpret_cast<int32_t*>(mail + layout_.positions),
  };
  if (!layout_.is_mailed) {
    // Every block reads all counts: better once over the link.
    WordCopies copies;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      int32_t* const counts = scratch_.counts + r * shape_.num_experts;
      copies.Add(args.counts.of[r], counts, shape_.num_experts);
      args.counts.of[r] = counts;
    }
    TB_RETURN_IF_ERROR(
        Check(LaunchWordCopies(copies, caller_.stream), "counts kernel"));
  }
  TB_RETURN_IF_ERROR(
      Check(LaunchPositions(shape_, args, caller_.stream), "positions kernel"));
  if (layout_.is_mailed) return MailDispatch(call);
  return layout_.is_broadcast ? BroadcastDispatch(call) : RingDispatch(call);
}

Status PackedCall::Pack(const GpuDispatch& call, const Boxes& outbox,
                        bool for_peers, bool for_own) {
  const PackArgs args = {
      .tokens = call.tokens,
      .expert_ids = call.expert_ids,
      .positions = call.slots,
      .group_sizes = call.group_sizes,
      .rows = call.rows,
      .outbox = outbox,
      .for_peers = for_peers,
      .for_own = for_own,
  };
  return Check(LaunchPack(shape_, args, caller_.stream), "pack kernel");
}

Status PackedCall::Unpack(const GpuDispatch& call, const Boxes& inbox,
                          const Arrived& arrived) {
  const UnpackArgs args = {
      .expert_ids = Tables(layout_.ids, own_.expert_ids),
      .positions = Tables(layout_.positions, own_.positions),
      .inbox = inbox,
      .arrived = arrived,
      .rows = call.rows,
  };
  return Check(LaunchUnpack(shape_, args, caller_.stream), "unpack kernel");
}

Status PackedCall::MailDispatch(const GpuDispatch& call) {
  Boxes boxes = {.of = InAll<uint8_t>(layout_.rows)};
  const Boxes outbox = {.of = SameForAll(boxes.of.of[shape_.rank]),
                        .index = nullptr,
                        .is_shared = true};
  TB_RETURN_IF_ERROR(Pack(call, outbox, true, true));
  TB_RETURN_IF_ERROR(visit_.Meet());
  return Unpack(call, boxes);
}

Status PackedCall::BroadcastDispatch(const GpuDispatch& call) {
  TB_RETURN_IF_ERROR(visit_.Meet({scratch_.inbox}));
  TB_RETURN_IF_ERROR(PushTokens(call.tokens));
  TB_RETURN_IF_ERROR(ReadTables());
  TB_RETURN_IF_ERROR(Pack(call, {}, false, true));
  TB_RETURN_IF_ERROR(EndTransfers());
  Boxes inbox;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    inbox.of.of[r] =
        scratch_.inbox + layout_.InboxOf(shape_.rank, r) * shape_.row_bytes;
  }
  return Unpack(call, inbox);
}

Status PackedCall::RingDispatch(const GpuDispatch& call) {
  TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/true));
  TB_ASSIGN_OR_RETURN(const SharedEvent counted, visit_.Mark());
  TB_RETURN_IF_ERROR(
      Pack(call, Numbered(scratch_.outbox, scratch_.own_index), true, false));
  TB_RETURN_IF_ERROR(SwapTotals(counted, scratch_.outbox));
  TB_RETURN_IF_ERROR(PullRows(/*is_forward=*/true));
  TB_RETURN_IF_ERROR(ReadTables());
  TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/false));
  TB_RETURN_IF_ERROR(Pack(call, {}, false, true));
  const Boxes inbox = Numbered(scratch_.inbox, scratch_.peer_index);
  TB_RETURN_IF_ERROR(ForParts(
      [&](const Arrived& arrived) { return Unpack(call, inbox, arrived); }));
  return EndTransfers();
}

Status PackedCall::Combine(const GpuCombine& call) {
  own_ = {call.expert_ids, call.slots, call.weights};
  TB_RETURN_IF_ERROR(TakeMail());
  TB_RETURN_IF_ERROR(PostTables());
  SharedEvent counted;
  if (!layout_.is_mailed) {
    TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/true));
    TB_ASSIGN_OR_RETURN(counted, visit_.Mark());
  }
  TB_RETURN_IF_ERROR(SwapMail());
  TB_RETURN_IF_ERROR(ReadTables());
  CombineArgs args = {
      .expert_ids = Tables(layout_.ids, own_.expert_ids),
      .positions = Tables(layout_.positions, own_.positions),
      .weights = Weights(),
      .rows = call.rows,
      .outbox = Numbered(scratch_.outbox, scratch_.peer_index),
      .inbox = Numbered(scratch_.inbox, scratch_.own_index),
      .arrived = {},
      .out = call.sums,
  };
  if (layout_.is_mailed) {
    args.inbox = {.of = InAll<uint8_t>(layout_.rows)};
    for (int r = 0; r < shape_.num_ranks; ++r) {
      args.outbox.of.of[r] =
          args.inbox.of.of[shape_.rank] + r * layout_.box_bytes();
    }
    for (int r = 0; r < shape_.num_ranks; ++r) {
      args.inbox.of.of[r] += shape_.rank * layout_.box_bytes();
    }
  } else {
    TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/false));
  }
  TB_RETURN_IF_ERROR(
      Check(LaunchPartial(shape_, call.dtype, args, caller_.stream),
            "partial-sum kernel"));
  if (layout_.is_mailed) {
    TB_RETURN_IF_ERROR(visit_.Meet());
  } else {
    TB_RETURN_IF_ERROR(SwapTotals(counted, scratch_.outbox));
    TB_RETURN_IF_ERROR(PullRows(/*is_forward=*/false));
    TB_RETURN_IF_ERROR(AwaitReceived());
  }
  TB_RETURN_IF_ERROR(
      Check(LaunchSum(shape_, call.dtype, args, caller_.stream), "sum kernel"));
  return layout_.is_mailed ? OkStatus() : EndTransfers();
}

Status PackedCall::CombineGrad(const GpuCombineGrad& call) {
  own_ = {call.expert_ids, call.slots, call.weights};
  TB_RETURN_IF_ERROR(TakeMail());
  TB_RETURN_IF_ERROR(PostTables());
  CombineGradArgs args = {
      .expert_ids = {},
      .positions = {},
      .weights = {},
      .out_grad = call.sum_grads,
      .rows = call.rows,
      .row_grads = SameForAll(call.row_grads),
      .has_boxes = true,
      .outbox = Numbered(scratch_.outbox, scratch_.own_index),
      .inbox = Numbered(scratch_.inbox, scratch_.peer_index),
      .weight_grads = SameForAll(call.weight_grads),
      .group_sizes = call.group_sizes,
  };
  args.expert_ids.of[shape_.rank] = own_.expert_ids;
  args.positions.of[shape_.rank] = own_.positions;
  args.weights.of[shape_.rank] = own_.weights;
  const auto send = [&](bool for_peers, bool for_own) {
    args.for_peers = for_peers;
    args.for_own = for_own;
    return Check(LaunchGradSend(shape_, call.dtype, args, caller_.stream),
                 "gradient send kernel");
  };
  if (layout_.is_mailed) {
    args.outbox = {.of = SameForAll(mail_->data() + layout_.rows),
                   .index = nullptr,
                   .is_shared = true};
    TB_RETURN_IF_ERROR(send(true, true));
    TB_RETURN_IF_ERROR(SwapMail());
    args.inbox = {.of = InAll<uint8_t>(layout_.rows)};
  } else {
    TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/true));
    TB_ASSIGN_OR_RETURN(const SharedEvent counted, visit_.Mark());
    TB_RETURN_IF_ERROR(send(true, false));
    TB_RETURN_IF_ERROR(SwapMail());
    TB_RETURN_IF_ERROR(SwapTotals(counted, scratch_.outbox));
    TB_RETURN_IF_ERROR(PullRows(/*is_forward=*/true));
    TB_RETURN_IF_ERROR(ReadTables());
    TB_RETURN_IF_ERROR(NumberTokens(/*is_outgoing=*/false));
    TB_RETURN_IF_ERROR(send(false, true));
    TB_RETURN_IF_ERROR(AwaitReceived());
  }
  args.expert_ids = Tables(layout_.ids, own_.expert_ids);
  args.positions = Tables(layout_.positions, own_.positions);
  args.weights = Weights();
  // What this rank finds goes by mail; kernels write it there if it is little.
  uint8_t* const mailed_grads = mail_->data() + layout_.grads;
  uint8_t* const grads = layout_.is_mailed ? mailed_grads : scratch_.grads;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    args.weight_grads.of[r] = grads + r * layout_.grad_bytes();
  }
  TB_RETURN_IF_ERROR(
      Check(LaunchGradExpand(shape_, call.dtype, args, caller_.stream),
            "gradient expand kernel"));
  if (layout_.is_mailed) {
    TB_RETURN_IF_ERROR(visit_.Meet());
  } else {
    TB_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(mailed_grads, grads,
                              shape_.num_ranks * layout_.grad_bytes(),
                              cudaMemcpyDefault, caller_.stream),
              "copy of weight gradients"));
    TB_RETURN_IF_ERROR(EndTransfers());
  }
  MergeArgs merge = {
      .expert_ids = own_.expert_ids,
      .positions = own_.positions,
      .found = {},
      .weight_grads = call.weight_grads,
  };
  for (int r = 0; r < shape_.num_ranks; ++r) {
    merge.found.of[r] = In<const uint8_t>(
        r, layout_.grads + shape_.rank * layout_.grad_bytes());
  }
  return Check(LaunchMerge(shape_, call.dtype, merge, caller_.stream),
               "merge kernel");
}

int WeightWords(DType dtype, bool has_weights) {
  if (!has_weights) return 0;
  return dtype == DType::kF64 ? 2 : 1;
}

PackedLayout LayoutOf(const Caller& caller, const GpuDispatch& call) {
  return {PackedOp::kDispatch, call.shape, caller.wiring, 0};
}

PackedLayout LayoutOf(const Caller& caller, const GpuCombine& call) {
  return {PackedOp::kCombine, call.shape, caller.wiring,
          WeightWords(call.dtype, call.has_weights)};
}

PackedLayout LayoutOf(const Caller& caller, const GpuCombineGrad& call) {
  return {PackedOp::kCombineGrad, call.shape, caller.wiring,
          WeightWords(call.dtype, true)};
}

template <typename Call>
int64_t SizeOf(const Caller& caller, const Call& call) {
  return PackedScratch(LayoutOf(caller, call), nullptr).size_bytes;
}

}  // namespace

int64_t PackedScratchBytes(const Caller& caller, const GpuDispatch& call) {
  return SizeOf(caller, call);
}

int64_t PackedScratchBytes(const Caller& caller, const GpuCombine& call) {
  return SizeOf(caller, call);
}

int64_t PackedScratchBytes(const Caller& caller, const GpuCombineGrad& call) {
  return SizeOf(caller, call);
}

Status PackedDispatch(const Caller& caller, const GpuDispatch& call) {
  return PackedCall(caller, LayoutOf(caller, call), call.scratch)
      .Dispatch(call);
}

Status PackedCombine(const Caller& caller, const GpuCombine& call) {
  return PackedCall(caller, LayoutOf(caller, call), call.scratch).Combine(call);
}

Status PackedCombineGrad(const Caller& caller, const GpuCombineGrad& call) {
  return PackedCall(caller, LayoutOf(caller, call), call.scratch)
      .CombineGrad(call);
}

}  // namespace turbobus::moe::cuda

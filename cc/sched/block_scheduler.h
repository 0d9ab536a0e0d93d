#ifndef TURBOBUS_SCHED_BLOCK_SCHEDULER_H_
#define TURBOBUS_SCHED_BLOCK_SCHEDULER_H_

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "sched/finish_time.h"
#include "sched/scheduler.h"
#include "sched/tables.h"

namespace turbobus::sched {

/// The one implementation of `Scheduler`.
///
/// Every event marks the links for which it may have made work eligible; `Next`
/// looks at marked links only, direct lanes before relays, and unmarks a link
/// when it has nothing for it. So a block costs a few lanes' worth of
/// arithmetic, whatever the number of transfers.
class BlockScheduler final : public Scheduler {
 public:
  explicit BlockScheduler(Tables tables);

  Status Submit(const Transfer& transfer, int64_t now_ns) override;
  std::optional<Block> Next(int64_t now_ns) override;
  Status Complete(BlockId block, int64_t now_ns) override;
  Status Fail(BlockId block, int64_t now_ns) override;
  Status Cancel(TransferId transfer, int64_t now_ns) override;
  Status RemoveLane(int lane, int64_t now_ns) override;
  std::vector<Finished> TakeFinished() override;
  std::vector<TransferId> TakeStranded() override;
  std::optional<int64_t> NextWakeupNs() const override;
  bool is_idle() const override { return slots_by_id_.empty(); }
  void Rescan() override { MarkAll(); }
  LaneState lane_state(int lane) const override;

 private:
  /// Bits of a block's id that are its place in `in_flight_`.
  static constexpr int kSlotBits = 24;

  struct InFlight {
    /// Part of the block's id, so that the id of a block that has ended is
    /// never taken for a later one.
    int64_t generation = 0;
    int transfer = kNone;
    int lane = kNone;
    Extent extent;
    int64_t issue_ns = 0;
    int64_t service_ns = 0;
    /// What shared caps were expected to cost it.
    double cap_stretch = 1;
  };

  // Queues (block_scheduler_queues.cc): which lists a transfer is in.
  int NewTransfer();
  bool MayRelayFresh(const TransferState& transfer) const;
  bool MayRelay(const TransferState& transfer) const;
  void InsertBySequence(int t);
  void UpdateRelayable(int t);
  void UpdateWaiting(Queue& queue);
  void UpdateSharing(Lane& lane);
  void UpdateSharing(const Queue& queue);
  void Enqueue(int t, int64_t num_bytes);
  void Dequeue(int t);
  void PassToken(int t);
  void TakeFromChunk(int t, int64_t num_bytes);
  void Return(int t, Extent extent);
  void FinishIfDone(int t);
  void Erase(int t);
  void Strand(Queue& queue);

  // Choice (block_scheduler_next.cc): what a link does next.

  /// The bytes of a transfer that a lane would copy next.
  struct Piece {
    /// Index into `TransferState::returned`, or `kNone` for fresh bytes.
    int returned = kNone;
    /// 0: nothing for this lane.
    int64_t size_bytes = 0;
  };
  struct Choice {
    int lane = kNone;
    int transfer = kNone;
    Piece piece;
  };

  bool OpenSlot();
  std::optional<Choice> ChooseOwn(int link, int64_t now_ns);
  std::optional<Choice> ChooseRelayed(int link, int64_t now_ns);
  std::optional<Choice> DirectTakes(Queue& queue, int64_t now_ns);
  std::optional<Choice> RelayTakes(int lane, int64_t now_ns);
  bool IsWorthRelaying(const Choice& choice, int64_t now_ns) const;
  bool IsOpen(int lane, int64_t size_bytes, int64_t now_ns);
  bool IsAnyRelayOpen(const TransferState& transfer, int64_t now_ns);
  Piece DirectPiece(const TransferState& transfer, int lane, int64_t now_ns);
  Piece RelayPiece(const TransferState& transfer, int lane) const;
  int64_t MaxBytes(const TransferState& transfer, const Lane& lane) const;
  Block Issue(const Choice& choice, int64_t now_ns);
  Extent Take(TransferState& transfer, const Piece& piece);
  void CountActive(const Lane& lane, int sign);
  void MarkDeferred(Queue& queue);
  void MarkDeferredAround(const HostLink& link);
  void MarkAll();
  void WakeAt(int link, int64_t at_ns);

  // Events (block_scheduler.cc).
  InFlight* Find(BlockId block);
  InFlight Retire(InFlight& in_flight, int64_t now_ns);
  void LearnLateness(const InFlight& in_flight, int64_t now_ns);
  void DetachLane(int lane);

  Tables tables_;
  std::unordered_map<TransferId, int> slots_by_id_;
  std::vector<int> free_transfers_;
  std::vector<InFlight> in_flight_;
  std::vector<int> free_in_flight_;
  int num_in_flight_ = 0;
  uint64_t next_sequence_ = 0;
  std::vector<Finished> finished_;
  std::vector<TransferId> stranded_;

  BitSet own_marks_;
  BitSet relay_marks_;
  /// Links that wait for a time: a probe's, or a cap's.
  BitSet timed_links_;
  int64_t wakeup_ns_ = kNever;

  /// Lock-step: the current slot, and whether it still takes blocks.
  int64_t slot_ = 0;
  bool is_slot_open_ = false;
  double slot_ns_per_byte_ = 0;
};

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_BLOCK_SCHEDULER_H_

#ifndef TURBOBUS_MOE_CUDA_PACKED_CALL_H_
#define TURBOBUS_MOE_CUDA_PACKED_CALL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "moe/cuda/events.h"
#include "moe/cuda/gpu_exchange.h"
#include "moe/cuda/kernels.h"
#include "moe/cuda/mail.h"
#include "moe/cuda/packed_layout.h"
#include "moe/cuda/ring_transfers.h"
#include "moe/cuda/visit.h"

namespace turbobus::moe::cuda {

/// One rank's call: what the packed exchanges (packed_exchange.h) are made of,
/// and themselves. For one host thread. Whatever this rank has enqueued on
/// streams of rings is over before its caller's stream passes the call; so is
/// what peers send it, unless the call failed.
class PackedCall {
 public:
  PackedCall(const Caller& caller, const PackedLayout& layout, void* scratch,
             const Tally& tally)
      : caller_(caller),
        shape_(layout.shape),
        layout_(layout),
        scratch_(layout, scratch),
        tally_(tally),
        visit_(caller),
        transfers_(caller, visit_) {}
  ~PackedCall();
  PackedCall(const PackedCall&) = delete;
  PackedCall& operator=(const PackedCall&) = delete;

  Status Dispatch(const GpuDispatch& call);
  Status Combine(const GpuCombine& call);
  Status CombineGrad(const GpuCombineGrad& call);

 private:
  /// Takes mail, unless an earlier call turns out to have gone wrong.
  Status Begin();
  /// Meets; then every rank's mail is known and holds what was enqueued before.
  Status SwapMail();
  /// Copies this rank's tables into its mail.
  Status PostTables();
  /// Makes the peers' tables readable: in mail, or on the device.
  Status ReadTables();
  /// Takes this rank's totals from the plan that wrote `slots`, if they are
  /// remembered.
  void Recall(const int32_t* slots);
  /// The same from what was counted early.
  Status RecallEarly(const void* early);
  /// Lets later calls by `slots` recall them.
  void Remember(const int32_t* slots);
  /// Lets none of them recall what other `slots` in the same memory had.
  void Forget(const int32_t* slots);
  /// Copies totals out of memory that is soon another call's.
  void KeepTotals(const int32_t* pinned);
  /// Numbers this rank's tokens for the peers, or theirs for it.
  Status NumberTokens(bool is_outgoing);
  /// Meets when the host knows how many of this rank's rows there are: it does,
  /// or waits until the GPU has numbered them.
  Status SwapTotals(const void* address);

  /// When the parts are there that a peer packed for this rank, from the
  /// meeting that swapped totals.
  std::vector<cudaEvent_t> ReadyEventsOf(int rank) const;

  /// The host's part of a ring transfer: from each peer's packed rows into this
  /// rank's. `is_forward`: rows of the peers' tokens; else of this rank's.
  Status PullRows(bool is_forward);
  /// Calls `use` for each part of the pulled rows, on which the caller's stream
  /// has then waited.
  Status ForParts(const std::function<Status(const Arrived&)>& use);
  /// Sums up what goes to the peers, in parts if all hosts know how many rows
  /// there are: the first is on its way while the next is summed up.
  Status SumForPeers(DType dtype, CombineArgs& args);
  /// Every token of this rank into every peer's inbox.
  Status PushTokens(const uint8_t* tokens);

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
  Peers<T> SameForAll(T* pointer) const {
    Peers<T> peers;
    for (int r = 0; r < shape_.num_ranks; ++r) peers.of[r] = pointer;
    return peers;
  }
  /// The same box for all peers, rows numbered by `index`.
  Boxes Numbered(uint8_t* rows, const int32_t* index) const;

  /// The same before the totals are swapped; only if `all_know_`.
  int64_t EarlyTotal(int tokens_of, int rows_on) const {
    return early_totals_[tokens_of * shape_.num_ranks + rows_on];
  }
  /// Rows that the tokens of one rank have on another, one each.
  int64_t Total(int tokens_of, int rows_on) const;
  Status Check(cudaError_t error, const char* what) {
    return visit_.Check(error, what);
  }

  const Caller& caller_;
  const Shape shape_;
  const PackedLayout layout_;
  const PackedScratch scratch_;
  const Tally tally_;
  Visit visit_;
  struct {
    const int32_t* expert_ids = nullptr;
    const int32_t* positions = nullptr;
    const void* weights = nullptr;
  } own_;  // This rank's tables.
  /// The host's totals: null until it has some.
  std::shared_ptr<const int32_t> totals_;
  SharedEvent counted_;  // After it they are in mail.
  /// Whether all ranks knew theirs when they swapped mail, and what.
  bool all_know_ = false;
  std::vector<int64_t> early_totals_;  // [num_ranks, num_ranks]
  /// After it this call's memory is nobody else's. `visit_` keeps it.
  cudaEvent_t begun_ = nullptr;
  /// After each, one more part of what goes to the peers is there; the last
  /// part is when the totals are swapped.
  std::vector<SharedEvent> summed_;
  std::shared_ptr<Mail> mail_;
  std::vector<Mail*> mails_;  // By rank; `visit_` keeps them.
  RingTransfers transfers_;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_PACKED_CALL_H_

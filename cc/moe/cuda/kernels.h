#ifndef TURBOBUS_MOE_CUDA_KERNELS_H_
#define TURBOBUS_MOE_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

// The kernels of the expert exchange (docs/gpu_exchange.md). Each `Launch…`
// only enqueues on `stream`, on the current device, and returns the launch's
// status. Pointers are device pointers; those in `Peers` may be another GPU's
// memory.

namespace turbobus::moe::cuda {

inline constexpr int kMaxRanks = 16;
/// Slots of a token that the kernels hold in one warp.
inline constexpr int kMaxTopK = 32;
/// Experts whose counters fit in a block's shared memory.
inline constexpr int kMaxExperts = 1024;

enum class DType : int { kF32, kF64, kF16, kBF16, kOther };

/// What all kernels of one exchange know.
struct Shape {
  int rank = 0;
  int num_ranks = 1;
  int num_tokens = 0;  // On each rank.
  int top_k = 1;
  int num_experts = 1;
  int num_local_experts = 1;
  int64_t row_bytes = 0;
  /// Rows of a result; packed: `recv_capacity`, padded: experts x capacity.
  int64_t num_rows = 0;
  /// 0: rows are packed by expert; else each local expert has this many.
  int expert_capacity = 0;
};

/// Counters on the current GPU to which one call's kernels add the bytes that
/// its ranks send each other; null: nothing is counted.
struct Tally {
  unsigned long long* bytes = nullptr;  // [num_ranks, num_ranks]: from, to.
};

/// Counters that each GPU has, zeros at first.
inline constexpr int64_t kNumTrafficCounters = 32768;
/// Where those of the current GPU are.
cudaError_t TrafficCounters(unsigned long long** address);

template <typename T>
struct Peers {
  T* of[kMaxRanks] = {};
};

/// Rows on their way between two ranks, one region a peer: the row of token t
/// of the tokens' rank is row `index[peer, t]` of it, or row t if there is no
/// index.
struct Boxes {
  Peers<uint8_t> of;
  const int32_t* index = nullptr;  // s32[num_ranks, num_tokens]; -1: no row.
  /// The regions are one: a row is written once, for all peers.
  bool is_shared = false;
};

/// Rows [begin, end) of each peer's numbered box, as `Boxes::index` numbers
/// them: what has come by now, or goes first. With `is_first` also what needs
/// none of them.
struct Arrived {
  bool is_all = true;
  bool is_first = true;
  int32_t begin[kMaxRanks] = {};
  int32_t end[kMaxRanks] = {};
};

/// Tokens that one block of the plan and of the send kernels handles.
int TokensPerBlock(const Shape& shape);
int NumPlanBlocks(const Shape& shape);
/// Bytes of `block_offsets`: s32[num plan blocks, num_experts].
int64_t PlanScratchBytes(const Shape& shape);

/// Counts this rank's slots by expert: `counts` s32[num_experts], and for each
/// block of tokens how many slots of an expert come before it
/// (`block_offsets`). Ids outside [0, num_experts) count nowhere.
cudaError_t LaunchPlan(const Shape& shape, const int32_t* expert_ids,
                       int32_t* counts, int32_t* block_offsets,
                       cudaStream_t stream);

struct SendArgs {
  Peers<const int32_t> counts;  // Each rank's, from its plan.
  /// s32[num_ranks, num_tokens, top_k] of each rank: the rows on that rank, -1
  /// for slots elsewhere. This rank's part of the peers' is written here.
  Peers<int32_t> arrivals;
  Peers<uint8_t> rows;           // Each rank's result.
  const int32_t* expert_ids;     // s32[num_tokens, top_k]
  const int32_t* block_offsets;  // From this rank's plan.
  const uint8_t* tokens;         // [num_tokens, row]
  int32_t* positions;            // s32[num_tokens, top_k], written here.
  int32_t* group_sizes;          // s32[num_local_experts]: rows kept.
  int32_t* wanted;               // s32[num_local_experts]: before drops.
  /// Whether a token goes once to each rank (expand follows) or once a copy.
  bool is_deduplicated;
  Tally tally;
};

/// Writes each token to its rows, `positions` (the row at its expert's rank, or
/// -1: masked or dropped; choices of one expert share one), the sizes of this
/// rank's experts, and zeroes this rank's padding rows. Which rows are dropped:
/// `RowPlan` in moe/plan.h, with the same result.
cudaError_t LaunchSend(const Shape& shape, const SendArgs& args,
                       cudaStream_t stream);

/// Copies rows of this rank's result to the further places that their tokens
/// have on it (after a deduplicated send of all ranks is done).
cudaError_t LaunchExpand(const Shape& shape, const int32_t* arrivals,
                         uint8_t* rows, cudaStream_t stream);

struct PositionsArgs {
  Peers<const int32_t> counts;   // Each rank's, from its plan.
  const int32_t* expert_ids;     // s32[num_tokens, top_k]
  const int32_t* block_offsets;  // From this rank's plan.
  int32_t* positions;            // As in `SendArgs`; written here.
  int32_t* group_sizes;
  int32_t* wanted;
  // Copies of ids and positions for other ranks, or null.
  int32_t* posted_ids;
  int32_t* posted_positions;
};

/// What `LaunchSend` decides, without any row moved.
cudaError_t LaunchPositions(const Shape& shape, const PositionsArgs& args,
                            cudaStream_t stream);

/// Arrays of words that one launch copies.
struct WordCopies {
  static constexpr int kMax = 3 * kMaxRanks;
  const int32_t* from[kMax] = {};
  int32_t* to[kMax] = {};
  int64_t num_words[kMax] = {};
  int count = 0;

  void Add(const void* source, void* target, int64_t words) {
    from[count] = static_cast<const int32_t*>(source);
    to[count] = static_cast<int32_t*>(target);
    num_words[count++] = words;
  }
};

cudaError_t LaunchWordCopies(const WordCopies& copies, cudaStream_t stream);

/// What a kernel found, in pinned memory: the host was told of another number
/// of rows than there are.
struct TotalFault {
  enum State : int32_t { kNone, kClaimed, kReported };
  int32_t state = kNone;
  int32_t peer = 0;
  int32_t told = 0;
  int32_t found = 0;
};

struct NumberArgs {
  // Each rank's tables, of which the tokens' ranks' are read.
  Peers<const int32_t> expert_ids;
  Peers<const int32_t> positions;
  /// Whether this rank's tokens are numbered for each peer that has rows of
  /// them, or each peer's tokens that have rows here.
  bool is_outgoing = true;
  int32_t* index;         // s32[num_ranks, num_tokens]: see `Boxes`.
  int32_t* block_counts;  // Scratch, NumberScratchBytes(shape).
  int32_t* totals;        // s32[num_ranks]
  /// Totals that the host goes by. One that is not so is told of in `fault`,
  /// unless that is null.
  int32_t told[kMaxRanks] = {};
  TotalFault* fault = nullptr;
};

int64_t NumberScratchBytes(const Shape& shape);

/// Numbers the tokens whose rows travel: by peer, then by token.
cudaError_t LaunchNumber(const Shape& shape, const NumberArgs& args,
                         cudaStream_t stream);

struct PackArgs {
  const uint8_t* tokens;
  const int32_t* expert_ids;
  const int32_t* positions;
  const int32_t* group_sizes;  // Of this rank, for its padding.
  uint8_t* rows;               // This rank's result.
  Boxes outbox;
  // What is done.
  bool for_peers = true;
  bool for_own = true;
  Tally tally;  // Of the rows for peers.
  /// What goes to each peer otherwise, and is only counted here.
  int64_t broadcast_bytes = 0;
};

/// Copies each token once into the box of each peer that has a row of it (for
/// peers); copies it to its rows on this rank and zeroes this rank's padding
/// rows (for its own).
cudaError_t LaunchPack(const Shape& shape, const PackArgs& args,
                       cudaStream_t stream);

struct UnpackArgs {
  Peers<const int32_t> expert_ids;
  Peers<const int32_t> positions;
  Boxes inbox;
  Arrived arrived;  // Only these rows are copied.
  uint8_t* rows;
};

/// Copies the peers' tokens out of their boxes to all their rows on this rank.
cudaError_t LaunchUnpack(const Shape& shape, const UnpackArgs& args,
                         cudaStream_t stream);

struct CombineArgs {
  Peers<const int32_t> expert_ids;
  Peers<const int32_t> positions;
  /// [num_tokens, top_k] of each rank, float (double for kF64). Null: each row
  /// counts once, whatever choices share it (the transpose of dispatch).
  Peers<const void> weights;
  const uint8_t* rows;  // This rank's experts' results.
  Boxes outbox;         // For the peers' tokens; written by `LaunchPartial`.
  Arrived leaving;      // `LaunchPartial`: only these rows of it.
  Boxes inbox;          // For this rank's tokens; read by `LaunchSum`.
  Arrived arrived;      // `LaunchSum`: tokens whose last row is one of these.
  uint8_t* out;         // [num_tokens, row]
  Tally tally;          // `LaunchPartial`: of its rows.
};

/// Writes this rank's share of every peer's tokens into that peer's box.
cudaError_t LaunchPartial(const Shape& shape, DType dtype,
                          const CombineArgs& args, cudaStream_t stream);

/// `out` = this rank's own rows and all ranks' partial rows, added in rank
/// order in float32 (float64 for float64).
cudaError_t LaunchSum(const Shape& shape, DType dtype, const CombineArgs& args,
                      cudaStream_t stream);

struct CombineGradArgs {
  Peers<const int32_t> expert_ids;
  Peers<const int32_t> positions;
  Peers<const void> weights;  // As in `CombineArgs`, not null.
  const uint8_t* out_grad;    // [num_tokens, row], of this rank's tokens.
  const uint8_t* rows;        // What combine summed on this rank.
  Peers<uint8_t> row_grads;   // Each rank's result, as `rows`.
  /// Whether `out_grad` travels through boxes, not straight into `row_grads`,
  /// of which then only this rank's is used.
  bool has_boxes = false;
  Boxes outbox;
  Boxes inbox;
  Peers<void> weight_grads;    // [num_tokens, top_k] of each rank.
  const int32_t* group_sizes;  // Of this rank, for its padding.
  // What `LaunchGradSend` does.
  bool for_peers = true;
  bool for_own = true;
  /// `LaunchGradSend`: of its rows for peers, and of the weight gradients that
  /// will come back for them.
  Tally tally;
};

/// Sends `out_grad` to the first place of each token on each peer, or its box
/// there (for peers);
/// finishes the slots that stay on this rank, zeroes its padding and the weight
/// gradients of slots that have no row (for its own).
cudaError_t LaunchGradSend(const Shape& shape, DType dtype,
                           const CombineGradArgs& args, cudaStream_t stream);

/// On the expert's rank, for the peers' tokens: row gradients, and weight
/// gradients written to the token's rank.
cudaError_t LaunchGradExpand(const Shape& shape, DType dtype,
                             const CombineGradArgs& args, cudaStream_t stream);

struct MergeArgs {
  const int32_t* expert_ids;
  const int32_t* positions;
  /// What each peer found for this rank's tokens, [num_tokens, top_k].
  Peers<const void> found;
  void* weight_grads;  // [num_tokens, top_k]
};

/// Takes the weight gradients of slots whose rows are on peers from there.
cudaError_t LaunchMerge(const Shape& shape, DType dtype, const MergeArgs& args,
                        cudaStream_t stream);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_KERNELS_H_

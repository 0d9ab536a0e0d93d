#ifndef TURBOBUS_MOE_CUDA_ROWS_CUH_
#define TURBOBUS_MOE_CUDA_ROWS_CUH_

#include <algorithm>
#include <cstdint>

#include "moe/cuda/kernels.h"

// What the kernels share: one warp works on one token's rows; lane j < top_k
// holds what is known of its slot j.

namespace turbobus::moe::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr int kThreads = 256;
inline constexpr int kWarpsPerBlock = kThreads / kWarpSize;
inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int Lane() { return threadIdx.x % kWarpSize; }
__device__ inline int WarpInBlock() { return threadIdx.x / kWarpSize; }

/// The `index`-th of all ranks but `rank`.
__device__ inline int PeerOf(int rank, unsigned index) {
  const int peer = static_cast<int>(index);
  return peer + (peer >= rank ? 1 : 0);
}

/// One token's slots. Choices of one expert share a row: the lowest of their
/// lanes stands for it.
struct Slots {
  int position = -1;      // The row that this lane stands for, or -1.
  int owner = -1;         // The rank that holds it.
  unsigned sharing = 0;   // Lanes whose slots have this lane's row.
  bool has_row = false;   // Whether this lane's slot has a row at all.
  bool is_first = false;  // Whether `position` is its token's first on `owner`.

  /// Lanes that stand for a row on `rank`; all lanes call together.
  __device__ unsigned On(int rank) const {
    return __ballot_sync(kAllLanes, position >= 0 && owner == rank);
  }
};

/// `position` -1: this lane's slot has no row. All lanes call together.
__device__ inline Slots MakeSlots(int position, int owner) {
  Slots slots;
  slots.has_row = position >= 0;
  const auto row = slots.has_row
                       ? static_cast<unsigned long long>(owner) << 32 |
                             static_cast<unsigned>(position)
                       : ~0ull;
  slots.sharing = __match_any_sync(kAllLanes, row);
  if (slots.has_row && __ffs(slots.sharing) - 1 == Lane()) {
    slots.position = position;
    slots.owner = owner;
  }
  const unsigned same_owner = __match_any_sync(kAllLanes, slots.owner);
  slots.is_first = slots.position >= 0 && __ffs(same_owner) - 1 == Lane();
  return slots;
}

/// What a row counts: the sum of its slots' weights, in slot order, or 1 if
/// there are no weights. Meaningful on lanes that stand for a row.
template <typename W>
__device__ inline W WeightOf(const Shape& shape, const void* weights,
                             int64_t token, const Slots& slots) {
  if (weights == nullptr) return 1;
  W own = 0;
  if (Lane() < shape.top_k) {
    own = static_cast<const W*>(weights)[token * shape.top_k + Lane()];
  }
  const bool is_shared = (slots.sharing & (slots.sharing - 1)) != 0;
  if (!__any_sync(kAllLanes, slots.has_row && is_shared)) return own;
  W sum = 0;
  for (int j = 0; j < shape.top_k; ++j) {
    const W weight = __shfl_sync(kAllLanes, own, j);
    if ((slots.sharing >> j & 1u) != 0) sum += weight;
  }
  return sum;
}

/// Reads one token's slots out of its rank's tables. Slots are data: those
/// outside a result count as none.
__device__ inline Slots ReadSlots(const Shape& shape, const int32_t* expert_ids,
                                  const int32_t* positions, int64_t token) {
  int position = -1;
  int owner = -1;
  const int lane = Lane();
  if (lane < shape.top_k) {
    const int64_t slot = token * shape.top_k + lane;
    const int id = expert_ids[slot];
    position = positions[slot];
    if (position >= shape.num_rows || id < 0 || id >= shape.num_experts) {
      position = -1;
    }
    if (position >= 0) owner = id / shape.num_local_experts;
  }
  return MakeSlots(position, owner);
}

/// Where the row of `token` is in the box of `peer`. In a box with an index
/// only rows that travel have a place.
__device__ inline uint8_t* PlaceIn(const Boxes& boxes, const Shape& shape,
                                   int peer, int64_t token) {
  const int64_t row =
      boxes.index != nullptr
          ? boxes.index[static_cast<int64_t>(peer) * shape.num_tokens + token]
          : token;
  return boxes.of.of[peer] + row * shape.row_bytes;
}

/// The number of a row in a box that has an index.
__device__ inline int NumberIn(const Boxes& boxes, const Shape& shape, int peer,
                               int64_t token) {
  return boxes.index[static_cast<int64_t>(peer) * shape.num_tokens + token];
}

/// Whether this lane's slot sends its token into a box, and not another's that
/// stands for the same box. All lanes call together.
__device__ inline bool IsBoxed(const Boxes& boxes, const Shape& shape,
                               const Slots& slots) {
  const bool is_first = slots.is_first && slots.owner != shape.rank;
  if (!boxes.is_shared) return is_first;
  const unsigned all = __ballot_sync(kAllLanes, is_first);
  return is_first && __ffs(all) - 1 == Lane();
}

/// What a block's tokens send to peers: a row to each rank that has one, and
/// what comes back for each choice. In shared memory.
struct SentRows {
  int num_rows[kMaxRanks];
  int num_choices[kMaxRanks];

  /// The whole block takes part, as in `Report`.
  __device__ void Clear() {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < kMaxRanks) num_rows[peer] = num_choices[peer] = 0;
    __syncthreads();
  }
  /// One token; its warp.
  __device__ void Add(const Shape& shape, const Slots& slots) {
    if (slots.position < 0 || slots.owner == shape.rank) return;
    if (slots.is_first) atomicAdd(&num_rows[slots.owner], 1);
    atomicAdd(&num_choices[slots.owner], __popc(slots.sharing));
  }
  /// `scalar_bytes` come back for each choice.
  __device__ void Report(const Shape& shape, const Tally& tally,
                         int scalar_bytes = 0) {
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (tally.bytes == nullptr || peer >= shape.num_ranks ||
        num_rows[peer] == 0) {
      return;
    }
    atomicAdd(
        &tally.bytes[shape.rank * shape.num_ranks + peer],
        static_cast<unsigned long long>(num_rows[peer] * shape.row_bytes));
    if (scalar_bytes == 0) return;
    atomicAdd(
        &tally.bytes[peer * shape.num_ranks + shape.rank],
        static_cast<unsigned long long>(num_choices[peer]) * scalar_bytes);
  }
};

/// The index of the lowest set bit, which is cleared.
__device__ inline int PopBit(unsigned& bits) {
  const int bit = __ffs(bits) - 1;
  bits &= bits - 1;
  return bit;
}

/// Copies a row to one place for each bit of `targets`: lane `bit` holds that
/// place in `target`. The whole warp takes part.
template <typename Vec>
__device__ inline void CopyRow(const uint8_t* source, uint8_t* target,
                               unsigned targets, int64_t row_bytes) {
  constexpr int kUnroll = 4;
  const auto* from = reinterpret_cast<const Vec*>(source);
  const int64_t num_vecs = row_bytes / static_cast<int64_t>(sizeof(Vec));
  const int lane = Lane();
  for (int64_t base = 0; base < num_vecs; base += kUnroll * kWarpSize) {
    Vec part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * kWarpSize + lane;
      if (i < num_vecs) part[u] = from[i];
    }
    for (unsigned bits = targets; bits != 0;) {
      const int bit = PopBit(bits);
      auto* to = reinterpret_cast<Vec*>(__shfl_sync(
          kAllLanes, reinterpret_cast<unsigned long long>(target), bit));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = base + u * kWarpSize + lane;
        if (i < num_vecs) to[i] = part[u];
      }
    }
  }
}

/// Zeroes rows [begin, end); the warps of `num_warps` share them.
template <typename Vec>
__device__ inline void ZeroRows(uint8_t* rows, int64_t begin, int64_t end,
                                int64_t row_bytes, int64_t warp,
                                int64_t num_warps) {
  const int64_t num_vecs = row_bytes / static_cast<int64_t>(sizeof(Vec));
  for (int64_t row = begin + warp; row < end; row += num_warps) {
    auto* to = reinterpret_cast<Vec*>(rows + row * row_bytes);
    for (int64_t i = Lane(); i < num_vecs; i += kWarpSize) to[i] = Vec{};
  }
}

/// Zeroes the rows of this rank's result that no token has: behind all of them
/// where rows are packed, behind each expert's where they are padded. Sizes
/// that do not fit are cut, as in moe/plan.h: they are data that a caller may
/// have changed. One of `num_blocks` blocks.
template <typename Vec>
__device__ inline void ZeroPadding(const Shape& shape,
                                   const int32_t* group_sizes, uint8_t* rows,
                                   int block, int num_blocks) {
  const int64_t warp =
      static_cast<int64_t>(block) * kWarpsPerBlock + WarpInBlock();
  const int64_t num_warps = static_cast<int64_t>(num_blocks) * kWarpsPerBlock;
  if (shape.expert_capacity > 0) {
    for (int expert = 0; expert < shape.num_local_experts; ++expert) {
      const int64_t first =
          static_cast<int64_t>(expert) * shape.expert_capacity;
      const int64_t kept =
          min(max(group_sizes[expert], 0), shape.expert_capacity);
      ZeroRows<Vec>(rows, first + kept, first + shape.expert_capacity,
                    shape.row_bytes, warp, num_warps);
    }
    return;
  }
  int64_t kept = 0;
  for (int expert = 0; expert < shape.num_local_experts; ++expert) {
    kept = min(kept + max(group_sizes[expert], 0), shape.num_rows);
  }
  ZeroRows<Vec>(rows, kept, shape.num_rows, shape.row_bytes, warp, num_warps);
}

template <typename T>
__device__ inline T WarpSum(T value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

/// Calls `launch` with a value of the widest vector type that rows of
/// `row_bytes` are made of.
template <typename Launch>
cudaError_t ForVector(int64_t row_bytes, Launch launch) {
  if (row_bytes % 16 == 0) return launch(uint4{});
  if (row_bytes % 8 == 0) return launch(uint2{});
  if (row_bytes % 4 == 0) return launch(uint32_t{});
  if (row_bytes % 2 == 0) return launch(uint16_t{});
  return launch(uint8_t{});
}

inline int NumBlocks(int64_t num_warps) {
  return static_cast<int>((num_warps + kWarpsPerBlock - 1) / kWarpsPerBlock);
}

/// Blocks that only zero a rank's padding, beside those of the same kernel that
/// move rows, so that it costs no time of its own: they are the first of the
/// grid, since what begins last ends last, and as many as write as fast as the
/// memory does, since a quarter of all rows may be padding.
inline int NumPaddingBlocks(const Shape& shape) {
  constexpr int64_t kBytesPerBlock = 256 << 10;
  return static_cast<int>(std::clamp<int64_t>(
      shape.num_rows * shape.row_bytes / kBytesPerBlock, 32, 256));
}

/// A warp for each token of each peer.
inline dim3 PeerGrid(const Shape& shape) {
  return {static_cast<unsigned>(NumBlocks(shape.num_tokens)),
          static_cast<unsigned>(shape.num_ranks - 1), 1};
}

inline bool HasPeerTokens(const Shape& shape) {
  return shape.num_ranks > 1 && shape.num_tokens > 0;
}

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_ROWS_CUH_

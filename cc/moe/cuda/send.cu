#include <algorithm>

#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

constexpr int kMaxSlotsPerBlock = 256;

/// By expert: how many of its rows come from ranks before this one (`before`),
/// how many are wanted and kept, and its first row at its rank (`start`). The
/// same decisions as `RowPlan`, from the counts of all ranks.
struct Bases {
  int32_t* before;
  int32_t* wanted;
  int32_t* kept;
  int32_t* start;

  static constexpr int kNumTables = 4;

  __device__ Bases(int32_t* shared, int num_experts)
      : before(shared),
        wanted(shared + num_experts),
        kept(shared + 2 * num_experts),
        start(shared + 3 * num_experts) {}

  /// The whole block takes part.
  __device__ void Make(const Shape& shape, const Peers<const int32_t>& counts) {
    for (int e = threadIdx.x; e < shape.num_experts; e += blockDim.x) {
      int sum = 0;
      int mine = 0;
      for (int r = 0; r < shape.num_ranks; ++r) {
        if (r == shape.rank) mine = sum;
        sum += counts.of[r][e];
      }
      before[e] = mine;
      wanted[e] = sum;
    }
    __syncthreads();
    for (int r = WarpInBlock(); r < shape.num_ranks; r += kWarpsPerBlock) {
      Keep(shape, r * shape.num_local_experts);
    }
    __syncthreads();
  }

 private:
  /// Sum over a rank's experts of min(wanted, level); one warp.
  __device__ int64_t SumCutTo(const Shape& shape, int first, int64_t level) {
    int64_t sum = 0;
    for (int i = Lane(); i < shape.num_local_experts; i += kWarpSize) {
      sum += min(static_cast<int64_t>(wanted[first + i]), level);
    }
    return WarpSum(sum);
  }

  /// Decides what one rank keeps, and where; one warp.
  __device__ void Keep(const Shape& shape, int first) {
    int64_t level = shape.expert_capacity;
    int64_t num_over = 0;  // Rows that the level leaves over.
    if (shape.expert_capacity == 0) {
      level = shape.num_rows;
      if (const int64_t total = SumCutTo(shape, first, INT32_MAX);
          total > shape.num_rows) {
        // The highest level that fits.
        int64_t low = 0;
        for (int64_t high = shape.num_rows; low < high;) {
          const int64_t middle = (low + high + 1) / 2;
          if (SumCutTo(shape, first, middle) <= shape.num_rows) {
            low = middle;
          } else {
            high = middle - 1;
          }
        }
        level = low;
        num_over = shape.num_rows - SumCutTo(shape, first, level);
      }
    }
    int64_t row = 0;
    for (int base = 0; base < shape.num_local_experts; base += kWarpSize) {
      const int local = base + Lane();
      const bool is_expert = local < shape.num_local_experts;
      const int want = is_expert ? wanted[first + local] : 0;
      const unsigned fuller = __ballot_sync(kAllLanes, want > level);
      const int num_before = __popc(fuller & ((1u << Lane()) - 1));
      int keep = static_cast<int>(min(static_cast<int64_t>(want), level));
      if (want > level && num_before < num_over) ++keep;
      num_over -= min(num_over, static_cast<int64_t>(__popc(fuller)));
      int sum = keep;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const int other = __shfl_up_sync(kAllLanes, sum, offset);
        if (Lane() >= offset) sum += other;
      }
      if (is_expert) {
        kept[first + local] = keep;
        start[first + local] = shape.expert_capacity > 0
                                   ? local * shape.expert_capacity
                                   : static_cast<int32_t>(row + sum - keep);
      }
      row += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    }
  }
};

/// The row of slot `s` of this block at its expert's rank, or -1. `ids`: of the
/// block's slots; `offsets`: by expert, the slots of blocks before.
__device__ int RowOf(const Shape& shape, const Bases& bases, const int32_t* ids,
                     const int32_t* offsets, int s) {
  const int id = ids[s];
  if (id < 0 || id >= shape.num_experts) return -1;
  // Its token's place among all that chose the expert; choices of earlier
  // tokens of this block count once each.
  int index = bases.before[id] + offsets[id];
  const int token_begin = s - s % shape.top_k;
  for (int t = 0; t < token_begin; t += shape.top_k) {
    bool has_chosen = false;
    for (int j = 0; j < shape.top_k; ++j) has_chosen |= ids[t + j] == id;
    index += has_chosen;
  }
  return index < bases.kept[id] ? bases.start[id] + index : -1;
}

template <typename Vec>
__global__ void __launch_bounds__(kThreads)
    Send(const __grid_constant__ Shape shape,
         const __grid_constant__ SendArgs args, int tokens_per_block,
         int num_padding_blocks) {
  extern __shared__ int32_t shared[];
  __shared__ int32_t ids[kMaxSlotsPerBlock];
  __shared__ int32_t rows[kMaxSlotsPerBlock];
  __shared__ int num_sent[kMaxRanks];
  if (threadIdx.x < kMaxRanks) num_sent[threadIdx.x] = 0;
  Bases bases(shared, shape.num_experts);
  bases.Make(shape, args.counts);
  const int first_expert = shape.rank * shape.num_local_experts;
  const int block = static_cast<int>(blockIdx.x) - num_padding_blocks;
  if (block < 0) {
    const int32_t* group_sizes = bases.kept + first_expert;
    if (block == -1) {
      for (int e = threadIdx.x; e < shape.num_local_experts; e += blockDim.x) {
        args.group_sizes[e] = group_sizes[e];
        args.wanted[e] = bases.wanted[first_expert + e];
      }
    }
    ZeroPadding<Vec>(shape, group_sizes, args.rows.of[shape.rank],
                     static_cast<int>(blockIdx.x), num_padding_blocks);
    return;
  }

  const int64_t first_token = static_cast<int64_t>(block) * tokens_per_block;
  const int num_tokens = static_cast<int>(min(
      static_cast<int64_t>(tokens_per_block), shape.num_tokens - first_token));
  const int num_slots = num_tokens * shape.top_k;
  const int64_t first_slot = first_token * shape.top_k;
  for (int s = threadIdx.x; s < num_slots; s += blockDim.x) {
    ids[s] = args.expert_ids[first_slot + s];
  }
  __syncthreads();
  const int32_t* offsets =
      args.block_offsets + static_cast<int64_t>(block) * shape.num_experts;
  for (int s = threadIdx.x; s < num_slots; s += blockDim.x) {
    const int id = ids[s];
    const int row = RowOf(shape, bases, ids, offsets, s);
    rows[s] = row;
    args.positions[first_slot + s] = row;
    if (!args.is_deduplicated) continue;
    const int owner = row >= 0 ? id / shape.num_local_experts : -1;
    const int64_t place =
        static_cast<int64_t>(shape.rank) * shape.num_tokens * shape.top_k +
        first_slot + s;
    for (int r = 0; r < shape.num_ranks; ++r) {
      if (r != shape.rank) args.arrivals.of[r][place] = r == owner ? row : -1;
    }
  }
  __syncthreads();

  for (int t = WarpInBlock(); t < num_tokens; t += kWarpsPerBlock) {
    int position = -1;
    int owner = -1;
    if (Lane() < shape.top_k) {
      position = rows[t * shape.top_k + Lane()];
      if (position >= 0) {
        owner = ids[t * shape.top_k + Lane()] / shape.num_local_experts;
      }
    }
    const Slots slots = MakeSlots(position, owner);
    const bool is_target =
        slots.position >= 0 &&
        (!args.is_deduplicated || slots.owner == shape.rank || slots.is_first);
    if (is_target) atomicAdd(&num_sent[slots.owner], 1);
    uint8_t* target =
        is_target ? args.rows.of[slots.owner] + slots.position * shape.row_bytes
                  : nullptr;
    CopyRow<Vec>(args.tokens + (first_token + t) * shape.row_bytes, target,
                 __ballot_sync(kAllLanes, is_target), shape.row_bytes);
  }
  if (args.tally.bytes == nullptr) return;
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= shape.num_ranks || peer == shape.rank || num_sent[peer] == 0) {
    return;
  }
  atomicAdd(&args.tally.bytes[shape.rank * shape.num_ranks + peer],
            static_cast<unsigned long long>(num_sent[peer] * shape.row_bytes));
}

/// As `Send`, without rows. The last block only writes sizes.
__global__ void __launch_bounds__(kThreads)
    Positions(const __grid_constant__ Shape shape,
              const __grid_constant__ PositionsArgs args,
              int tokens_per_block) {
  extern __shared__ int32_t shared[];
  __shared__ int32_t ids[kMaxSlotsPerBlock];
  Bases bases(shared, shape.num_experts);
  bases.Make(shape, args.counts);
  if (blockIdx.x == gridDim.x - 1) {
    const int first_expert = shape.rank * shape.num_local_experts;
    for (int e = threadIdx.x; e < shape.num_local_experts; e += blockDim.x) {
      args.group_sizes[e] = bases.kept[first_expert + e];
      args.wanted[e] = bases.wanted[first_expert + e];
    }
    return;
  }
  const int64_t first_token =
      static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int num_tokens = static_cast<int>(min(
      static_cast<int64_t>(tokens_per_block), shape.num_tokens - first_token));
  const int num_slots = num_tokens * shape.top_k;
  const int64_t first_slot = first_token * shape.top_k;
  for (int s = threadIdx.x; s < num_slots; s += blockDim.x) {
    ids[s] = args.expert_ids[first_slot + s];
    if (args.posted_ids != nullptr) args.posted_ids[first_slot + s] = ids[s];
  }
  __syncthreads();
  const int32_t* offsets =
      args.block_offsets + static_cast<int64_t>(blockIdx.x) * shape.num_experts;
  for (int s = threadIdx.x; s < num_slots; s += blockDim.x) {
    const int row = RowOf(shape, bases, ids, offsets, s);
    args.positions[first_slot + s] = row;
    if (args.posted_positions != nullptr) {
      args.posted_positions[first_slot + s] = row;
    }
  }
}

template <typename Vec>
__global__ void __launch_bounds__(kThreads)
    Expand(const __grid_constant__ Shape shape, const int32_t* arrivals,
           uint8_t* rows) {
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + WarpInBlock();
  if (token >= shape.num_tokens) return;
  const int source = PeerOf(shape.rank, blockIdx.y);
  int position = -1;
  if (Lane() < shape.top_k) {
    position =
        arrivals[(static_cast<int64_t>(source) * shape.num_tokens + token) *
                     shape.top_k +
                 Lane()];
  }
  const Slots slots = MakeSlots(position, shape.rank);
  const unsigned here = slots.On(shape.rank);
  const unsigned others = here & (here - 1);
  if (others == 0) return;
  const int64_t first = __shfl_sync(kAllLanes, slots.position, __ffs(here) - 1);
  uint8_t* target =
      slots.position >= 0 ? rows + slots.position * shape.row_bytes : nullptr;
  CopyRow<Vec>(rows + first * shape.row_bytes, target, others, shape.row_bytes);
}

}  // namespace

cudaError_t LaunchSend(const Shape& shape, const SendArgs& args,
                       cudaStream_t stream) {
  const int num_padding_blocks = NumPaddingBlocks(shape);
  const int num_blocks = num_padding_blocks + NumPlanBlocks(shape);
  const size_t shared_bytes =
      Bases::kNumTables * shape.num_experts * sizeof(int32_t);
  return ForVector(shape.row_bytes, [&](auto vec) {
    Send<decltype(vec)><<<num_blocks, kThreads, shared_bytes, stream>>>(
        shape, args, TokensPerBlock(shape), num_padding_blocks);
    return cudaGetLastError();
  });
}

cudaError_t LaunchPositions(const Shape& shape, const PositionsArgs& args,
                            cudaStream_t stream) {
  const size_t shared_bytes =
      Bases::kNumTables * shape.num_experts * sizeof(int32_t);
  Positions<<<NumPlanBlocks(shape) + 1, kThreads, shared_bytes, stream>>>(
      shape, args, TokensPerBlock(shape));
  return cudaGetLastError();
}

cudaError_t LaunchExpand(const Shape& shape, const int32_t* arrivals,
                         uint8_t* rows, cudaStream_t stream) {
  if (shape.num_ranks == 1 || shape.num_tokens == 0) return cudaSuccess;
  const dim3 grid(NumBlocks(shape.num_tokens), shape.num_ranks - 1);
  return ForVector(shape.row_bytes, [&](auto vec) {
    Expand<decltype(vec)><<<grid, kThreads, 0, stream>>>(shape, arrivals, rows);
    return cudaGetLastError();
  });
}

}  // namespace turbobus::moe::cuda

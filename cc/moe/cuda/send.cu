#include <algorithm>

#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

/// Blocks of the send kernels that only zero this rank's padding, beside those
/// that send, so that it costs no time of its own.
constexpr int kPaddingBlocks = 32;
constexpr int kMaxSlotsPerBlock = 256;

/// By expert: the first row at its rank (`start`) and how many of its rows come
/// from ranks before this one (`before`), from the counts of all ranks.
struct Bases {
  int32_t* start;
  int32_t* before;
  int32_t* total;

  __device__ Bases(int32_t* shared, int num_experts)
      : start(shared),
        before(shared + num_experts),
        total(shared + 2 * num_experts) {}

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
      total[e] = sum;
    }
    __syncthreads();
    for (int r = WarpInBlock(); r < shape.num_ranks; r += kWarpsPerBlock) {
      int carry = 0;
      for (int base = 0; base < shape.num_local_experts; base += kWarpSize) {
        const int local = base + Lane();
        const int e = r * shape.num_local_experts + local;
        const bool is_expert = local < shape.num_local_experts;
        const int count = is_expert ? total[e] : 0;
        int sum = count;
#pragma unroll
        for (int offset = 1; offset < kWarpSize; offset *= 2) {
          const int other = __shfl_up_sync(kAllLanes, sum, offset);
          if (Lane() >= offset) sum += other;
        }
        if (is_expert) {
          start[e] = shape.expert_capacity > 0 ? local * shape.expert_capacity
                                               : carry + sum - count;
        }
        carry += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
      }
    }
    __syncthreads();
  }

  /// Rows of an expert that its rank keeps.
  __device__ int Kept(const Shape& shape, int e) const {
    const int64_t room = shape.expert_capacity > 0 ? shape.expert_capacity
                                                   : shape.num_rows - start[e];
    return static_cast<int>(min(static_cast<int64_t>(total[e]),
                                max(room, static_cast<int64_t>(0))));
  }
};

template <typename Vec>
__global__ void __launch_bounds__(kThreads)
    Send(const __grid_constant__ Shape shape,
         const __grid_constant__ SendArgs args, int tokens_per_block,
         int num_send_blocks) {
  extern __shared__ int32_t shared[];  // Bases, then this rank's group sizes.
  __shared__ int32_t ids[kMaxSlotsPerBlock];
  __shared__ int32_t rows[kMaxSlotsPerBlock];
  Bases bases(shared, shape.num_experts);
  bases.Make(shape, args.counts);
  const int first_expert = shape.rank * shape.num_local_experts;
  uint8_t* const own_rows = args.rows.of[shape.rank];

  if (static_cast<int>(blockIdx.x) >= num_send_blocks) {
    int32_t* group_sizes = shared + 3 * shape.num_experts;
    for (int e = threadIdx.x; e < shape.num_local_experts; e += blockDim.x) {
      group_sizes[e] = bases.Kept(shape, first_expert + e);
    }
    __syncthreads();
    const int block = static_cast<int>(blockIdx.x) - num_send_blocks;
    if (block == 0) {
      int lost = 0;
      for (int e = threadIdx.x; e < shape.num_local_experts; e += blockDim.x) {
        args.group_sizes[e] = group_sizes[e];
        lost += bases.total[first_expert + e] - group_sizes[e];
      }
      lost = WarpSum(lost);
      if (Lane() == 0 && lost > 0) atomicAdd(args.overflow, lost);
    }
    ZeroPadding<Vec>(
        shape, group_sizes, own_rows,
        static_cast<int64_t>(block) * kWarpsPerBlock + WarpInBlock(),
        static_cast<int64_t>(kPaddingBlocks) * kWarpsPerBlock);
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
  }
  __syncthreads();
  const int32_t* offsets =
      args.block_offsets + static_cast<int64_t>(blockIdx.x) * shape.num_experts;
  for (int s = threadIdx.x; s < num_slots; s += blockDim.x) {
    const int id = ids[s];
    int row = -1;
    if (id >= 0 && id < shape.num_experts) {
      int index = bases.before[id] + offsets[id];  // Among its expert's rows.
      for (int other = 0; other < s; ++other) index += ids[other] == id;
      if (index < bases.Kept(shape, id)) row = bases.start[id] + index;
    }
    rows[s] = row;
    args.positions[first_slot + s] = row;
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
        position >= 0 &&
        (!args.is_deduplicated || owner == shape.rank || slots.is_first());
    uint8_t* target =
        is_target ? args.rows.of[owner] + position * shape.row_bytes : nullptr;
    CopyRow<Vec>(args.tokens + (first_token + t) * shape.row_bytes, target,
                 __ballot_sync(kAllLanes, is_target), shape.row_bytes);
  }
}

template <typename Vec>
__global__ void __launch_bounds__(kThreads)
    Expand(const __grid_constant__ Shape shape,
           const __grid_constant__ Peers<const int32_t> ids,
           const __grid_constant__ Peers<const int32_t> positions,
           uint8_t* rows) {
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + WarpInBlock();
  if (warp >= shape.num_tokens) return;
  const int source = static_cast<int>(blockIdx.y) +
                     (static_cast<int>(blockIdx.y) >= shape.rank ? 1 : 0);
  const Slots slots =
      ReadSlots(shape, ids.of[source], positions.of[source], warp);
  const unsigned here = slots.On(shape.rank);
  unsigned others = here & (here - 1);
  if (others == 0) return;
  const int first = __shfl_sync(kAllLanes, slots.position, __ffs(here) - 1);
  uint8_t* target =
      slots.position >= 0 ? rows + slots.position * shape.row_bytes : nullptr;
  CopyRow<Vec>(rows + first * shape.row_bytes, target, others, shape.row_bytes);
}

}  // namespace

cudaError_t LaunchSend(const Shape& shape, const SendArgs& args,
                       cudaStream_t stream) {
  const int num_send_blocks = NumPlanBlocks(shape);
  const size_t shared_bytes =
      (3 * shape.num_experts + shape.num_local_experts) * sizeof(int32_t);
  if (const cudaError_t error =
          cudaMemsetAsync(args.overflow, 0, sizeof(int32_t), stream);
      error != cudaSuccess) {
    return error;
  }
  return ForVector(shape.row_bytes, [&](auto vec) {
    Send<decltype(vec)>
        <<<num_send_blocks + kPaddingBlocks, kThreads, shared_bytes, stream>>>(
            shape, args, TokensPerBlock(shape), num_send_blocks);
    return cudaGetLastError();
  });
}

cudaError_t LaunchExpand(const Shape& shape, const Peers<const int32_t>& ids,
                         const Peers<const int32_t>& positions, uint8_t* rows,
                         cudaStream_t stream) {
  if (shape.num_ranks == 1 || shape.num_tokens == 0) return cudaSuccess;
  const dim3 grid(NumBlocks(shape.num_tokens), shape.num_ranks - 1);
  return ForVector(shape.row_bytes, [&](auto vec) {
    Expand<decltype(vec)>
        <<<grid, kThreads, 0, stream>>>(shape, ids, positions, rows);
    return cudaGetLastError();
  });
}

}  // namespace turbobus::moe::cuda

#include <algorithm>

#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

/// Ints of shared memory up to which one block makes the whole plan.
constexpr int kSmallPlan = 12288;
constexpr int kScanSegments = 32;

__device__ int64_t NumSlots(const Shape& shape) {
  return static_cast<int64_t>(shape.num_tokens) * shape.top_k;
}

/// The expert that a slot counts for; -1 if it names none, or one that an
/// earlier slot of its token has named.
__device__ int CountedExpert(const Shape& shape,
                             const int32_t* __restrict__ expert_ids,
                             int64_t slot) {
  const int id = expert_ids[slot];
  if (id < 0 || id >= shape.num_experts) return -1;
  for (int64_t other = slot - slot % shape.top_k; other < slot; ++other) {
    if (expert_ids[other] == id) return -1;
  }
  return id;
}

/// Turns per-block counts into exclusive prefixes over the blocks; the total
/// goes to `counts`. One thread an expert.
template <typename Counter>
__device__ void ScanOverBlocks(Counter counter, int num_blocks,
                               int32_t* total) {
  int sum = 0;
  for (int block = 0; block < num_blocks; ++block) {
    int32_t& here = counter(block);
    const int count = here;
    here = sum;
    sum += count;
  }
  *total = sum;
}

/// The whole plan in one block: small batches are bound by launches.
__global__ void SmallPlan(const __grid_constant__ Shape shape,
                          int tokens_per_block, int num_blocks,
                          const int32_t* __restrict__ expert_ids,
                          int32_t* counts, int32_t* block_offsets) {
  extern __shared__ int32_t histogram[];  // [num_blocks, num_experts]
  const int num_experts = shape.num_experts;
  const int size = num_blocks * num_experts;
  for (int i = threadIdx.x; i < size; i += blockDim.x) histogram[i] = 0;
  __syncthreads();
  const int slots_per_block = tokens_per_block * shape.top_k;
  for (int64_t slot = threadIdx.x; slot < NumSlots(shape); slot += blockDim.x) {
    const int id = CountedExpert(shape, expert_ids, slot);
    if (id >= 0) {
      atomicAdd(&histogram[slot / slots_per_block * num_experts + id], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    ScanOverBlocks(
        [&](int b) -> int32_t& { return histogram[b * num_experts + e]; },
        num_blocks, &counts[e]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    block_offsets[i] = histogram[i];
  }
}

__global__ void CountByBlock(const __grid_constant__ Shape shape,
                             int tokens_per_block,
                             const int32_t* __restrict__ expert_ids,
                             int32_t* block_offsets) {
  extern __shared__ int32_t histogram[];  // [num_experts]
  for (int e = threadIdx.x; e < shape.num_experts; e += blockDim.x) {
    histogram[e] = 0;
  }
  __syncthreads();
  const int slots_per_block = tokens_per_block * shape.top_k;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * slots_per_block;
  const int64_t end = min(first + slots_per_block, NumSlots(shape));
  for (int64_t slot = first + threadIdx.x; slot < end; slot += blockDim.x) {
    const int id = CountedExpert(shape, expert_ids, slot);
    if (id >= 0) atomicAdd(&histogram[id], 1);
  }
  __syncthreads();
  int32_t* out =
      block_offsets + static_cast<int64_t>(blockIdx.x) * shape.num_experts;
  for (int e = threadIdx.x; e < shape.num_experts; e += blockDim.x) {
    out[e] = histogram[e];
  }
}

/// Thread (x, y): expert x of this block's 32, segment y of the plan's blocks.
__global__ void ScanBlocks(const __grid_constant__ Shape shape, int num_blocks,
                           int32_t* counts, int32_t* block_offsets) {
  __shared__ int32_t segment_sum[kScanSegments][kWarpSize];
  const int expert = blockIdx.x * kWarpSize + threadIdx.x;
  const int per_segment = (num_blocks + kScanSegments - 1) / kScanSegments;
  const int first = threadIdx.y * per_segment;
  const int end = min(first + per_segment, num_blocks);
  const bool is_expert = expert < shape.num_experts;
  int sum = 0;
  if (is_expert) {
#pragma unroll 4
    for (int b = first; b < end; ++b) {
      sum +=
          block_offsets[static_cast<int64_t>(b) * shape.num_experts + expert];
    }
  }
  segment_sum[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  int before = 0;
  for (int y = 0; y < static_cast<int>(threadIdx.y); ++y) {
    before += segment_sum[y][threadIdx.x];
  }
  if (!is_expert) return;
  if (threadIdx.y == kScanSegments - 1) counts[expert] = before + sum;
  for (int b = first; b < end; ++b) {
    int32_t& here =
        block_offsets[static_cast<int64_t>(b) * shape.num_experts + expert];
    const int count = here;
    here = before;
    before += count;
  }
}

}  // namespace

int TokensPerBlock(const Shape& shape) {
  // About one block a multiprocessor, and at most 256 slots, which the send
  // kernel ranks among each other.
  const int most = std::max(1, std::min(32, 256 / shape.top_k));
  return std::clamp((shape.num_tokens + 127) / 128, 1, most);
}

int NumPlanBlocks(const Shape& shape) {
  const int per_block = TokensPerBlock(shape);
  return (shape.num_tokens + per_block - 1) / per_block;
}

int64_t PlanScratchBytes(const Shape& shape) {
  return static_cast<int64_t>(std::max(1, NumPlanBlocks(shape))) *
         shape.num_experts * static_cast<int64_t>(sizeof(int32_t));
}

cudaError_t LaunchPlan(const Shape& shape, const int32_t* expert_ids,
                       int32_t* counts, int32_t* block_offsets,
                       cudaStream_t stream) {
  const int num_blocks = NumPlanBlocks(shape);
  const int tokens_per_block = TokensPerBlock(shape);
  const int64_t size =
      static_cast<int64_t>(std::max(1, num_blocks)) * shape.num_experts;
  if (size <= kSmallPlan) {
    SmallPlan<<<1, 1024, size * sizeof(int32_t), stream>>>(
        shape, tokens_per_block, num_blocks, expert_ids, counts, block_offsets);
    return cudaGetLastError();
  }
  CountByBlock<<<num_blocks, kThreads, shape.num_experts * sizeof(int32_t),
                 stream>>>(shape, tokens_per_block, expert_ids, block_offsets);
  const int scan_blocks = (shape.num_experts + kWarpSize - 1) / kWarpSize;
  ScanBlocks<<<scan_blocks, dim3(kWarpSize, kScanSegments), 0, stream>>>(
      shape, num_blocks, counts, block_offsets);
  return cudaGetLastError();
}

}  // namespace turbobus::moe::cuda

#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

/// Whether a token has a row on `target`: what `ReadSlots` finds, by one
/// thread.
__device__ bool HasRowOn(const Shape& shape, const int32_t* expert_ids,
                         const int32_t* positions, int64_t token, int target) {
  const auto first_expert =
      static_cast<unsigned>(target * shape.num_local_experts);
  for (int j = 0; j < shape.top_k; ++j) {
    const int64_t slot = token * shape.top_k + j;
    // Ids are data: negative ones are large here.
    const unsigned local =
        static_cast<unsigned>(expert_ids[slot]) - first_expert;
    if (local >= static_cast<unsigned>(shape.num_local_experts)) continue;
    const int position = positions[slot];
    if (position >= 0 && position < shape.num_rows) return true;
  }
  return false;
}

/// Block (x, y): tokens x · kThreads …, peer y.
__device__ bool IsNumbered(const Shape& shape, const NumberArgs& args) {
  const int peer = static_cast<int>(blockIdx.y);
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (peer == shape.rank || token >= shape.num_tokens) return false;
  const int source = args.is_outgoing ? shape.rank : peer;
  return HasRowOn(shape, args.expert_ids.of[source], args.positions.of[source],
                  token, args.is_outgoing ? peer : shape.rank);
}

__global__ void __launch_bounds__(kThreads)
    CountNumbered(const __grid_constant__ Shape shape,
                  const __grid_constant__ NumberArgs args) {
  const int count = __syncthreads_count(IsNumbered(shape, args));
  if (threadIdx.x == 0) {
    args.block_counts[blockIdx.y * gridDim.x + blockIdx.x] = count;
  }
}

/// The sum of `value` over the block's threads, for all of them.
__device__ int BlockSum(int value) {
  __shared__ int sums[kWarpsPerBlock];
  const int warp_sum = WarpSum(value);
  __syncthreads();
  if (Lane() == 0) sums[WarpInBlock()] = warp_sum;
  __syncthreads();
  int sum = 0;
  for (const int part : sums) sum += part;
  return sum;
}

/// Tells the host of a total that it has wrong, unless one is still unread.
__device__ void Report(TotalFault* fault, int peer, int told, int found) {
  if (atomicCAS(&fault->state, TotalFault::kNone, TotalFault::kClaimed) !=
      TotalFault::kNone) {
    return;
  }
  fault->peer = peer;
  fault->told = told;
  fault->found = found;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&fault->state) = TotalFault::kReported;
}

__global__ void __launch_bounds__(kThreads)
    Number(const __grid_constant__ Shape shape,
           const __grid_constant__ NumberArgs args) {
  __shared__ int before_warp[kWarpsPerBlock];
  const int num_blocks = static_cast<int>(gridDim.x);
  const int block =
      static_cast<int>(blockIdx.y) * num_blocks + static_cast<int>(blockIdx.x);
  int before = 0;
  for (int b = static_cast<int>(threadIdx.x); b < block; b += kThreads) {
    before += args.block_counts[b];
  }
  before = BlockSum(before);

  const bool is_numbered = IsNumbered(shape, args);
  const unsigned lanes = __ballot_sync(kAllLanes, is_numbered);
  if (Lane() == 0) before_warp[WarpInBlock()] = __popc(lanes);
  __syncthreads();
  int number = before + __popc(lanes & ((1u << Lane()) - 1));
  for (int w = 0; w < WarpInBlock(); ++w) number += before_warp[w];
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token < shape.num_tokens) {
    args.index[static_cast<int64_t>(blockIdx.y) * shape.num_tokens + token] =
        is_numbered ? number : -1;
  }

  if (blockIdx.x != 0) return;
  int total = 0;
  for (int b = static_cast<int>(threadIdx.x); b < num_blocks; b += kThreads) {
    total += args.block_counts[block + b];
  }
  total = BlockSum(total);
  if (threadIdx.x != 0) return;
  args.totals[blockIdx.y] = total;
  const int told = args.told[blockIdx.y];
  if (args.fault != nullptr && total != told) {
    Report(args.fault, static_cast<int>(blockIdx.y), told, total);
  }
}

int NumNumberBlocks(const Shape& shape) {
  return (shape.num_tokens + kThreads - 1) / kThreads;
}

/// One block of `blockIdx.y` an array.
__global__ void __launch_bounds__(kThreads)
    CopyWords(const __grid_constant__ WordCopies copies) {
  const int32_t* from = copies.from[blockIdx.y];
  int32_t* to = copies.to[blockIdx.y];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < copies.num_words[blockIdx.y]; i += stride) {
    to[i] = from[i];
  }
}

}  // namespace

int64_t NumberScratchBytes(const Shape& shape) {
  return static_cast<int64_t>(shape.num_ranks) * NumNumberBlocks(shape) *
         static_cast<int64_t>(sizeof(int32_t));
}

cudaError_t LaunchNumber(const Shape& shape, const NumberArgs& args,
                         cudaStream_t stream) {
  if (shape.num_tokens == 0) {
    return cudaMemsetAsync(args.totals, 0, shape.num_ranks * sizeof(int32_t),
                           stream);
  }
  const dim3 grid(NumNumberBlocks(shape), shape.num_ranks);
  CountNumbered<<<grid, kThreads, 0, stream>>>(shape, args);
  Number<<<grid, kThreads, 0, stream>>>(shape, args);
  return cudaGetLastError();
}

cudaError_t LaunchWordCopies(const WordCopies& copies, cudaStream_t stream) {
  int64_t most = 0;
  for (int i = 0; i < copies.count; ++i) {
    most = most > copies.num_words[i] ? most : copies.num_words[i];
  }
  if (most == 0) return cudaSuccess;
  constexpr int64_t kWordsPerBlock = 4 * kThreads;
  constexpr int64_t kMostBlocks = 64;
  const int64_t blocks = (most + kWordsPerBlock - 1) / kWordsPerBlock;
  const dim3 grid(
      static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks),
      copies.count);
  CopyWords<<<grid, kThreads, 0, stream>>>(copies);
  return cudaGetLastError();
}

}  // namespace turbobus::moe::cuda

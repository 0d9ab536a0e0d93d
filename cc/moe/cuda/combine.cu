#include <algorithm>

#include "moe/cuda/elements.cuh"
#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

constexpr int kWide = 2;  // Of a batch; more need too many registers.
template <typename Pack>
using RowBatch = Batch<Pack, kWide>;
/// Sums at a batch's vectors.
template <typename Pack>
using Sums = typename Pack::Acc[RowBatch<Pack>::kNumVecs][Pack::kSize];

template <typename Pack>
__device__ void AddRow(const uint8_t* row, typename Pack::Acc weight,
                       const RowBatch<Pack>& batch, Sums<Pack>& sums) {
  typename RowBatch<Pack>::Words words;
  batch.Load(row, words);
  batch.Each(
      [&](int u, int64_t) { Pack::Of(words[u]).AddTo(sums[u], weight); });
}

/// Adds the weighted rows of `bits`' slots, in slot order.
template <typename Pack>
__device__ void AddRows(const Shape& shape, const uint8_t* rows,
                        const Slots& slots, typename Pack::Acc weight,
                        unsigned bits, const RowBatch<Pack>& batch,
                        Sums<Pack>& sums) {
  while (bits != 0) {
    const int bit = PopBit(bits);
    const int64_t row = __shfl_sync(kAllLanes, slots.position, bit);
    AddRow<Pack>(rows + row * shape.row_bytes,
                 __shfl_sync(kAllLanes, weight, bit), batch, sums);
  }
}

template <typename Pack>
__device__ void StoreSums(const Sums<Pack>& sums, const RowBatch<Pack>& batch,
                          uint8_t* row) {
  batch.Each([&](int u, int64_t vec) {
    reinterpret_cast<Pack*>(row)[vec] = Pack::From(sums[u]);
  });
}

template <typename Pack>
__global__ void __launch_bounds__(kThreads)
    Partial(const __grid_constant__ Shape shape,
            const __grid_constant__ CombineArgs args) {
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + WarpInBlock();
  const int source = PeerOf(shape.rank, blockIdx.y);
  const Slots slots = token < shape.num_tokens
                          ? ReadSlots(shape, args.expert_ids.of[source],
                                      args.positions.of[source], token)
                          : Slots{};
  unsigned here = slots.On(shape.rank);
  if (here != 0 && !args.leaving.is_all) {
    const int number = NumberIn(args.outbox, shape, source, token);
    if (number < args.leaving.begin[source] ||
        number >= args.leaving.end[source]) {
      here = 0;
    }
  }
  if (args.tally.bytes != nullptr && blockIdx.z == 0) {
    const int64_t num_rows = __syncthreads_count(here != 0 && Lane() == 0);
    if (threadIdx.x == 0 && num_rows > 0) {
      atomicAdd(&args.tally.bytes[shape.rank * shape.num_ranks + source],
                static_cast<unsigned long long>(num_rows * shape.row_bytes));
    }
  }
  if (here == 0) return;
  // A single row travels as it is, and its weight is applied where it arrives:
  // so it is rounded once. The sum of several is rounded here and there.
  const bool is_single = (here & (here - 1)) == 0;
  const auto weight = is_single
                          ? typename Pack::Acc{1}
                          : WeightOf<typename Pack::Acc>(
                                shape, args.weights.of[source], token, slots);
  uint8_t* const out = PlaceIn(args.outbox, shape, source, token);
  ForBatches<Pack, kWide>(shape.row_bytes, [&](const RowBatch<Pack>& batch) {
    Sums<Pack> sums = {};
    AddRows<Pack>(shape, args.rows, slots, weight, here, batch, sums);
    StoreSums<Pack>(sums, batch, out);
  });
}

/// Whether a token's sum is due: its last partial row is among those that have
/// come. The whole warp takes part.
__device__ bool IsDue(const Shape& shape, const Boxes& inbox,
                      const Arrived& arrived, int64_t token) {
  if (arrived.is_all) return true;
  bool is_among = false;
  bool is_later = false;
  const int peer = Lane();
  if (peer < shape.num_ranks && peer != shape.rank) {
    const int number = NumberIn(inbox, shape, peer, token);
    is_among = number >= arrived.begin[peer] && number < arrived.end[peer];
    is_later = number >= arrived.end[peer];
    // Without a row there (-1) a token waits for none.
    if (arrived.is_first && number < 0) is_among = true;
  }
  if (__any_sync(kAllLanes, is_later)) return false;
  return __any_sync(kAllLanes, is_among);
}

template <typename Pack>
__global__ void __launch_bounds__(kThreads)
    Sum(const __grid_constant__ Shape shape,
        const __grid_constant__ CombineArgs args) {
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + WarpInBlock();
  if (token >= shape.num_tokens) return;
  if (!IsDue(shape, args.inbox, args.arrived, token)) return;
  const Slots slots = ReadSlots(shape, args.expert_ids.of[shape.rank],
                                args.positions.of[shape.rank], token);
  const auto weight = WeightOf<typename Pack::Acc>(
      shape, args.weights.of[shape.rank], token, slots);
  const unsigned here = slots.On(shape.rank);
  uint8_t* const out = args.out + token * shape.row_bytes;
  // Each rank's partial row and what it counts, on the lane of that rank.
  typename Pack::Acc partial_weight = 0;
  const uint8_t* partial = nullptr;
  for (int r = 0; r < shape.num_ranks; ++r) {
    const unsigned there = slots.On(r);
    if (r == shape.rank || there == 0) continue;
    const auto single = __shfl_sync(kAllLanes, weight, __ffs(there) - 1);
    if (Lane() == r) {
      partial_weight =
          (there & (there - 1)) == 0 ? single : typename Pack::Acc{1};
      partial = PlaceIn(args.inbox, shape, r, token);
    }
  }
  ForBatches<Pack, kWide>(shape.row_bytes, [&](const RowBatch<Pack>& batch) {
    Sums<Pack> sums = {};
    for (int r = 0; r < shape.num_ranks; ++r) {
      if (r == shape.rank) {
        AddRows<Pack>(shape, args.rows, slots, weight, here, batch, sums);
        continue;
      }
      const auto scale = __shfl_sync(kAllLanes, partial_weight, r);
      const auto* row = reinterpret_cast<const uint8_t*>(__shfl_sync(
          kAllLanes, reinterpret_cast<unsigned long long>(partial), r));
      if (row != nullptr) AddRow<Pack>(row, scale, batch, sums);
    }
    StoreSums<Pack>(sums, batch, out);
  });
}

/// Parts of a row, each for a warp of its own, where whole rows would leave
/// most of the GPU idle: a few tokens take as long as one row's memory
/// latencies.
template <typename Pack>
unsigned NumParts(const Shape& shape) {
  constexpr int64_t kEnoughWarps = 2048;
  const int64_t num_steps =
      shape.row_bytes / static_cast<int64_t>(sizeof(Pack) * kWarpSize);
  const int64_t wanted = kEnoughWarps / std::max(shape.num_tokens, 1);
  return static_cast<unsigned>(
      std::clamp<int64_t>(wanted, 1, std::max<int64_t>(num_steps, 1)));
}

}  // namespace

cudaError_t LaunchPartial(const Shape& shape, DType dtype,
                          const CombineArgs& args, cudaStream_t stream) {
  if (!HasPeerTokens(shape)) return cudaSuccess;
  return ForPack(dtype, shape.row_bytes, [&](auto pack) {
    dim3 grid = PeerGrid(shape);
    grid.z = NumParts<decltype(pack)>(shape);
    Partial<decltype(pack)><<<grid, kThreads, 0, stream>>>(shape, args);
    return cudaGetLastError();
  });
}

cudaError_t LaunchSum(const Shape& shape, DType dtype, const CombineArgs& args,
                      cudaStream_t stream) {
  if (shape.num_tokens == 0) return cudaSuccess;
  return ForPack(dtype, shape.row_bytes, [&](auto pack) {
    const dim3 grid(NumBlocks(shape.num_tokens), 1,
                    NumParts<decltype(pack)>(shape));
    Sum<decltype(pack)><<<grid, kThreads, 0, stream>>>(shape, args);
    return cudaGetLastError();
  });
}

}  // namespace turbobus::moe::cuda

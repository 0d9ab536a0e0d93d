#include <algorithm>

#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

/// Adds the weighted rows of `bits`' slots, in slot order, at one vector.
template <typename Pack>
__device__ void AddRows(const Shape& shape, const uint8_t* rows,
                        const Slots& slots, typename Pack::Acc weight,
                        unsigned bits, int64_t vec,
                        typename Pack::Acc (&sum)[Pack::kSize]) {
  while (bits != 0) {
    const int bit = PopBit(bits);
    const int64_t row = __shfl_sync(kAllLanes, slots.position, bit);
    const auto scale = __shfl_sync(kAllLanes, weight, bit);
    if (vec >= 0) {
      reinterpret_cast<const Pack*>(rows + row * shape.row_bytes)[vec].AddTo(
          sum, scale);
    }
  }
}

/// The vectors of a row, or of the grid's z-th part of it, for a whole warp:
/// those past the end are -1, so that all lanes take part in the shuffles.
template <typename Body>
__device__ void ForVectors(int64_t num_vecs, Body body) {
  const int64_t num_steps = (num_vecs + kWarpSize - 1) / kWarpSize;
  const int64_t per_part = (num_steps + gridDim.z - 1) / gridDim.z;
  const int64_t begin = blockIdx.z * per_part;
  const int64_t end = min(begin + per_part, num_steps);
  for (int64_t step = begin; step < end; ++step) {
    const int64_t vec = step * kWarpSize + Lane();
    body(vec < num_vecs ? vec : -1);
  }
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
  const unsigned here = slots.On(shape.rank);
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
  auto* out =
      reinterpret_cast<Pack*>(PlaceIn(args.outbox, shape, source, token));
  ForVectors(shape.row_bytes / static_cast<int64_t>(sizeof(Pack)),
             [&](int64_t vec) {
               typename Pack::Acc sum[Pack::kSize] = {};
               AddRows<Pack>(shape, args.rows, slots, weight, here, vec, sum);
               if (vec >= 0) out[vec] = Pack::From(sum);
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
  auto* out = reinterpret_cast<Pack*>(args.out + token * shape.row_bytes);
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
  ForVectors(
      shape.row_bytes / static_cast<int64_t>(sizeof(Pack)), [&](int64_t vec) {
        typename Pack::Acc sum[Pack::kSize] = {};
        for (int r = 0; r < shape.num_ranks; ++r) {
          if (r == shape.rank) {
            AddRows<Pack>(shape, args.rows, slots, weight, here, vec, sum);
            continue;
          }
          const auto scale = __shfl_sync(kAllLanes, partial_weight, r);
          const auto* row = reinterpret_cast<const Pack*>(__shfl_sync(
              kAllLanes, reinterpret_cast<unsigned long long>(partial), r));
          if (row != nullptr && vec >= 0) row[vec].AddTo(sum, scale);
        }
        if (vec >= 0) out[vec] = Pack::From(sum);
      });
}

/// The gradients of lane `bit`'s row: weight · dy, and ⟨dy, row⟩ for the slots
/// that share the row. `out_grad_row` may be that row's own gradient.
template <typename Pack>
__device__ typename Pack::Acc SlotGrad(const Shape& shape,
                                       const uint8_t* out_grad_row,
                                       const uint8_t* rows, uint8_t* row_grads,
                                       int64_t row, typename Pack::Acc weight) {
  const auto* out_grad = reinterpret_cast<const Pack*>(out_grad_row);
  const auto* values =
      reinterpret_cast<const Pack*>(rows + row * shape.row_bytes);
  auto* grads = reinterpret_cast<Pack*>(row_grads + row * shape.row_bytes);
  typename Pack::Acc dot = 0;
  ForVectors(shape.row_bytes / static_cast<int64_t>(sizeof(Pack)),
             [&](int64_t vec) {
               if (vec < 0) return;
               typename Pack::Acc grad[Pack::kSize] = {};
               out_grad[vec].AddTo(grad, 1);
               dot += values[vec].Dot(grad);
               grads[vec] = Pack::From(grad, weight);
             });
  return WarpSum(dot);
}

template <typename Pack>
__global__ void __launch_bounds__(kThreads)
    GradSend(const __grid_constant__ Shape shape,
             const __grid_constant__ CombineGradArgs args,
             int num_send_blocks) {
  uint8_t* const own = args.row_grads.of[shape.rank];
  if (static_cast<int>(blockIdx.x) >= num_send_blocks) {
    const int block = static_cast<int>(blockIdx.x) - num_send_blocks;
    ZeroPadding<Pack>(
        shape, args.group_sizes, own,
        static_cast<int64_t>(block) * kWarpsPerBlock + WarpInBlock(),
        static_cast<int64_t>(kPaddingBlocks) * kWarpsPerBlock);
    return;
  }
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + WarpInBlock();
  const bool is_token = token < shape.num_tokens;
  const Slots slots = is_token
                          ? ReadSlots(shape, args.expert_ids.of[shape.rank],
                                      args.positions.of[shape.rank], token)
                          : Slots{};
  if (args.for_peers) {
    CountRows(shape, args.tally, slots, sizeof(typename Pack::Acc));
  }
  if (!is_token) return;
  const auto weight = WeightOf<typename Pack::Acc>(
      shape, args.weights.of[shape.rank], token, slots);
  auto* weight_grads =
      static_cast<typename Pack::Acc*>(args.weight_grads.of[shape.rank]) +
      token * shape.top_k;
  const uint8_t* out_grad = args.out_grad + token * shape.row_bytes;
  const bool is_target = args.has_boxes
                             ? IsBoxed(args.outbox, shape, slots)
                             : slots.is_first && slots.owner != shape.rank;
  uint8_t* target = nullptr;
  if (is_target) {
    target = args.has_boxes ? PlaceIn(args.outbox, shape, slots.owner, token)
                            : args.row_grads.of[slots.owner] +
                                  slots.position * shape.row_bytes;
  }
  if (args.for_peers) {
    CopyRow<Pack>(out_grad, target, __ballot_sync(kAllLanes, is_target),
                  shape.row_bytes);
  }
  if (!args.for_own) return;
  if (Lane() < shape.top_k && !slots.has_row) weight_grads[Lane()] = 0;
  for (unsigned bits = slots.On(shape.rank); bits != 0;) {
    const int bit = PopBit(bits);
    const auto grad =
        SlotGrad<Pack>(shape, out_grad, args.rows, own,
                       __shfl_sync(kAllLanes, slots.position, bit),
                       __shfl_sync(kAllLanes, weight, bit));
    if (slots.has_row && (slots.sharing >> bit & 1u) != 0) {
      weight_grads[Lane()] = grad;
    }
  }
}

template <typename Pack>
__global__ void __launch_bounds__(kThreads)
    GradExpand(const __grid_constant__ Shape shape,
               const __grid_constant__ CombineGradArgs args) {
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + WarpInBlock();
  if (token >= shape.num_tokens) return;
  const int source = PeerOf(shape.rank, blockIdx.y);
  const Slots slots = ReadSlots(shape, args.expert_ids.of[source],
                                args.positions.of[source], token);
  const unsigned here = slots.On(shape.rank);
  if (here == 0) return;
  const auto weight = WeightOf<typename Pack::Acc>(
      shape, args.weights.of[source], token, slots);
  uint8_t* const own = args.row_grads.of[shape.rank];
  const int first = __ffs(here) - 1;
  const int64_t first_row = __shfl_sync(kAllLanes, slots.position, first);
  auto* weight_grads =
      static_cast<typename Pack::Acc*>(args.weight_grads.of[source]) +
      token * shape.top_k;
  // Without boxes the first slot's row holds `dy` until all others have read
  // it.
  const uint8_t* const out_grad =
      args.has_boxes ? PlaceIn(args.inbox, shape, source, token)
                     : own + first_row * shape.row_bytes;
  for (unsigned bits = here & (here - 1);;) {
    const int bit = bits != 0 ? PopBit(bits) : first;
    const auto grad =
        SlotGrad<Pack>(shape, out_grad, args.rows, own,
                       __shfl_sync(kAllLanes, slots.position, bit),
                       __shfl_sync(kAllLanes, weight, bit));
    if (slots.has_row && (slots.sharing >> bit & 1u) != 0) {
      weight_grads[Lane()] = grad;
    }
    if (bit == first) break;
  }
}

template <typename W>
__global__ void __launch_bounds__(kThreads)
    Merge(const __grid_constant__ Shape shape,
          const __grid_constant__ MergeArgs args) {
  const int64_t slot =
      static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (slot >= static_cast<int64_t>(shape.num_tokens) * shape.top_k) return;
  const int id = args.expert_ids[slot];
  const int position = args.positions[slot];
  if (id < 0 || id >= shape.num_experts || position < 0 ||
      position >= shape.num_rows) {
    return;
  }
  const int owner = id / shape.num_local_experts;
  if (owner == shape.rank) return;
  static_cast<W*>(args.weight_grads)[slot] =
      static_cast<const W*>(args.found.of[owner])[slot];
}

dim3 PeerGrid(const Shape& shape) {
  return {static_cast<unsigned>(NumBlocks(shape.num_tokens)),
          static_cast<unsigned>(shape.num_ranks - 1), 1};
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

bool HasPeerTokens(const Shape& shape) {
  return shape.num_ranks > 1 && shape.num_tokens > 0;
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

cudaError_t LaunchGradSend(const Shape& shape, DType dtype,
                           const CombineGradArgs& args, cudaStream_t stream) {
  const int num_send_blocks = NumBlocks(shape.num_tokens);
  const int num_blocks = num_send_blocks + (args.for_own ? kPaddingBlocks : 0);
  if (num_blocks == 0) return cudaSuccess;
  return ForPack(dtype, shape.row_bytes, [&](auto pack) {
    GradSend<decltype(pack)>
        <<<num_blocks, kThreads, 0, stream>>>(shape, args, num_send_blocks);
    return cudaGetLastError();
  });
}

cudaError_t LaunchGradExpand(const Shape& shape, DType dtype,
                             const CombineGradArgs& args, cudaStream_t stream) {
  if (!HasPeerTokens(shape)) return cudaSuccess;
  return ForPack(dtype, shape.row_bytes, [&](auto pack) {
    GradExpand<decltype(pack)>
        <<<PeerGrid(shape), kThreads, 0, stream>>>(shape, args);
    return cudaGetLastError();
  });
}

cudaError_t LaunchMerge(const Shape& shape, DType dtype, const MergeArgs& args,
                        cudaStream_t stream) {
  if (!HasPeerTokens(shape)) return cudaSuccess;
  const int64_t num_slots =
      static_cast<int64_t>(shape.num_tokens) * shape.top_k;
  const int num_blocks =
      static_cast<int>((num_slots + kThreads - 1) / kThreads);
  if (dtype == DType::kF64) {
    Merge<double><<<num_blocks, kThreads, 0, stream>>>(shape, args);
  } else {
    Merge<float><<<num_blocks, kThreads, 0, stream>>>(shape, args);
  }
  return cudaGetLastError();
}

}  // namespace turbobus::moe::cuda

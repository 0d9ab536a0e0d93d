#include "moe/cuda/elements.cuh"
#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

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

}  // namespace

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

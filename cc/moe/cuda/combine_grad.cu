#include <algorithm>

#include "moe/cuda/elements.cuh"
#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

constexpr int kWide = 4;  // Of a batch.
/// Blocks that send to peers beside those that finish this rank's own slots.
/// Stores over a link, which is slower than memory, hold up whatever else their
/// multiprocessor does: so few blocks send, from the kernel's beginning to its
/// end, and others do the rest meanwhile (docs/gpu_exchange.md, "Measured:
/// kernels on one GPU").
constexpr int kSendBlocks = 64;

/// The gradients of a token's rows on this rank: weight · dy for each, and
/// ⟨dy, row⟩ for the slots that share it. `out_grad_row` may be one of these
/// rows' gradients: each batch of `dy` is read once, before any row of it is
/// written.
template <typename Pack>
__device__ void SlotGrads(const Shape& shape, const CombineGradArgs& args,
                          const uint8_t* out_grad_row, const Slots& slots,
                          typename Pack::Acc weight,
                          typename Pack::Acc* weight_grads) {
  const unsigned here = slots.On(shape.rank);
  uint8_t* const row_grads = args.row_grads.of[shape.rank];
  typename Pack::Acc dot = 0;  // Of the row that this lane stands for.
  ForBatches<Pack, kWide>(
      shape.row_bytes, [&](const Batch<Pack, kWide>& batch) {
        typename Batch<Pack, kWide>::Words out_grad;
        batch.Load(out_grad_row, out_grad);
        for (unsigned bits = here; bits != 0;) {
          const int bit = PopBit(bits);
          const int64_t place =
              __shfl_sync(kAllLanes, slots.position, bit) * shape.row_bytes;
          const auto scale = __shfl_sync(kAllLanes, weight, bit);
          auto* grads = reinterpret_cast<Pack*>(row_grads + place);
          typename Batch<Pack, kWide>::Words row;
          batch.Load(args.rows + place, row);
          typename Pack::Acc part = 0;
          batch.Each([&](int u, int64_t vec) {
            typename Pack::Acc grad[Pack::kSize] = {};
            Pack::Of(out_grad[u]).AddTo(grad, 1);
            part += Pack::Of(row[u]).Dot(grad);
            grads[vec] = Pack::From(grad, scale);
          });
          part = WarpSum(part);
          if (Lane() == bit) dot += part;
        }
      });
  dot = __shfl_sync(kAllLanes, dot, __ffs(slots.sharing) - 1);
  if ((slots.sharing & here) != 0) weight_grads[Lane()] = dot;
}

/// Sends `out_grad` of tokens to peers; one of `num_blocks` blocks.
template <typename Pack>
__device__ void SendToPeers(const Shape& shape, const CombineGradArgs& args,
                            int block, int num_blocks) {
  __shared__ SentRows sent;
  sent.Clear();
  for (int64_t token =
           static_cast<int64_t>(block) * kWarpsPerBlock + WarpInBlock();
       token < shape.num_tokens;
       token += static_cast<int64_t>(num_blocks) * kWarpsPerBlock) {
    const Slots slots = ReadSlots(shape, args.expert_ids.of[shape.rank],
                                  args.positions.of[shape.rank], token);
    sent.Add(shape, slots);
    const bool is_target = args.has_boxes
                               ? IsBoxed(args.outbox, shape, slots)
                               : slots.is_first && slots.owner != shape.rank;
    uint8_t* target = nullptr;
    if (is_target) {
      target = args.has_boxes ? PlaceIn(args.outbox, shape, slots.owner, token)
                              : args.row_grads.of[slots.owner] +
                                    slots.position * shape.row_bytes;
    }
    CopyRow<typename Pack::Words>(args.out_grad + token * shape.row_bytes,
                                  target, __ballot_sync(kAllLanes, is_target),
                                  shape.row_bytes);
  }
  sent.Report(shape, args.tally, sizeof(typename Pack::Acc));
}

/// What this rank's rows give a token of its own; one warp.
template <typename Pack>
__device__ void FinishOwn(const Shape& shape, const CombineGradArgs& args,
                          int64_t token) {
  const Slots slots = ReadSlots(shape, args.expert_ids.of[shape.rank],
                                args.positions.of[shape.rank], token);
  const auto weight = WeightOf<typename Pack::Acc>(
      shape, args.weights.of[shape.rank], token, slots);
  auto* weight_grads =
      static_cast<typename Pack::Acc*>(args.weight_grads.of[shape.rank]) +
      token * shape.top_k;
  if (Lane() < shape.top_k && !slots.has_row) weight_grads[Lane()] = 0;
  SlotGrads<Pack>(shape, args, args.out_grad + token * shape.row_bytes, slots,
                  weight, weight_grads);
}

/// Blocks in this order: those that zero padding, those that send, those that
/// finish own tokens.
template <typename Pack>
__global__ void __launch_bounds__(kThreads)
    GradSend(const __grid_constant__ Shape shape,
             const __grid_constant__ CombineGradArgs args,
             int num_padding_blocks, int num_send_blocks) {
  int block = static_cast<int>(blockIdx.x);
  if (block < num_padding_blocks) {
    ZeroPadding<typename Pack::Words>(shape, args.group_sizes,
                                      args.row_grads.of[shape.rank], block,
                                      num_padding_blocks);
    return;
  }
  block -= num_padding_blocks;
  if (block < num_send_blocks) {
    SendToPeers<Pack>(shape, args, block, num_send_blocks);
    return;
  }
  block -= num_send_blocks;
  const int64_t token =
      static_cast<int64_t>(block) * kWarpsPerBlock + WarpInBlock();
  if (token < shape.num_tokens) FinishOwn<Pack>(shape, args, token);
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
  // Without boxes the first slot's row holds `dy`.
  const int64_t first = __shfl_sync(kAllLanes, slots.position, __ffs(here) - 1);
  const uint8_t* const out_grad =
      args.has_boxes ? PlaceIn(args.inbox, shape, source, token)
                     : args.row_grads.of[shape.rank] + first * shape.row_bytes;
  SlotGrads<Pack>(
      shape, args, out_grad, slots, weight,
      static_cast<typename Pack::Acc*>(args.weight_grads.of[source]) +
          token * shape.top_k);
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
  const int num_token_blocks = NumBlocks(shape.num_tokens);
  const int num_padding_blocks = args.for_own ? NumPaddingBlocks(shape) : 0;
  const int num_own_blocks = args.for_own ? num_token_blocks : 0;
  const bool has_peers = args.for_peers && HasPeerTokens(shape);
  return ForPack(dtype, shape.row_bytes, [&](auto pack) {
    int num_send_blocks = has_peers ? num_token_blocks : 0;
    if (args.for_own) {
      // As many bytes under way of single elements, too.
      constexpr int kMost = kSendBlocks * (16 / sizeof(pack));
      num_send_blocks = std::min(num_send_blocks, kMost);
    }
    const int num_blocks =
        num_padding_blocks + num_send_blocks + num_own_blocks;
    if (num_blocks == 0) return cudaSuccess;
    GradSend<decltype(pack)><<<num_blocks, kThreads, 0, stream>>>(
        shape, args, num_padding_blocks, num_send_blocks);
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

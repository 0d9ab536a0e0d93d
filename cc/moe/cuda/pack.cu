#include "moe/cuda/rows.cuh"

namespace turbobus::moe::cuda {
namespace {

__device__ void CountBroadcast(const Shape& shape, const PackArgs& args,
                               int block) {
  const int peer = static_cast<int>(threadIdx.x);
  if (args.tally.bytes == nullptr || block != 0 || peer >= shape.num_ranks ||
      peer == shape.rank) {
    return;
  }
  atomicAdd(&args.tally.bytes[shape.rank * shape.num_ranks + peer],
            static_cast<unsigned long long>(args.broadcast_bytes));
}

template <typename Vec>
__global__ void __launch_bounds__(kThreads)
    PackRows(const __grid_constant__ Shape shape,
             const __grid_constant__ PackArgs args, int num_padding_blocks) {
  const int block = static_cast<int>(blockIdx.x) - num_padding_blocks;
  if (block < 0) {
    ZeroPadding<Vec>(shape, args.group_sizes, args.rows,
                     static_cast<int>(blockIdx.x), num_padding_blocks);
    return;
  }
  const int64_t token =
      static_cast<int64_t>(block) * kWarpsPerBlock + WarpInBlock();
  const bool is_token = token < shape.num_tokens;
  const Slots slots =
      is_token ? ReadSlots(shape, args.expert_ids, args.positions, token)
               : Slots{};
  if (args.for_peers && args.tally.bytes != nullptr) {
    __shared__ SentRows sent;
    sent.Clear();
    sent.Add(shape, slots);
    sent.Report(shape, args.tally);
  }
  if (args.broadcast_bytes > 0) CountBroadcast(shape, args, block);
  if (!is_token) return;
  uint8_t* target = nullptr;
  const bool is_boxed = IsBoxed(args.outbox, shape, slots);
  if (args.for_peers && is_boxed) {
    target = PlaceIn(args.outbox, shape, slots.owner, token);
  } else if (args.for_own && slots.position >= 0 && slots.owner == shape.rank) {
    target = args.rows + slots.position * shape.row_bytes;
  }
  const unsigned targets = __ballot_sync(kAllLanes, target != nullptr);
  if (targets == 0) return;
  CopyRow<Vec>(args.tokens + token * shape.row_bytes, target, targets,
               shape.row_bytes);
}

template <typename Vec>
__global__ void __launch_bounds__(kThreads)
    UnpackRows(const __grid_constant__ Shape shape,
               const __grid_constant__ UnpackArgs args) {
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + WarpInBlock();
  if (token >= shape.num_tokens) return;
  const int source = PeerOf(shape.rank, blockIdx.y);
  if (!args.arrived.is_all) {
    const int number = NumberIn(args.inbox, shape, source, token);
    if (number < args.arrived.begin[source] ||
        number >= args.arrived.end[source]) {
      return;
    }
  }
  const Slots slots = ReadSlots(shape, args.expert_ids.of[source],
                                args.positions.of[source], token);
  const unsigned here = slots.On(shape.rank);
  if (here == 0) return;
  uint8_t* target = slots.position >= 0
                        ? args.rows + slots.position * shape.row_bytes
                        : nullptr;
  CopyRow<Vec>(PlaceIn(args.inbox, shape, source, token), target, here,
               shape.row_bytes);
}

}  // namespace

cudaError_t LaunchPack(const Shape& shape, const PackArgs& args,
                       cudaStream_t stream) {
  const int num_padding_blocks = args.for_own ? NumPaddingBlocks(shape) : 0;
  const int num_blocks = num_padding_blocks + NumBlocks(shape.num_tokens);
  if (num_blocks == 0) return cudaSuccess;
  return ForVector(shape.row_bytes, [&](auto vec) {
    PackRows<decltype(vec)>
        <<<num_blocks, kThreads, 0, stream>>>(shape, args, num_padding_blocks);
    return cudaGetLastError();
  });
}

cudaError_t LaunchUnpack(const Shape& shape, const UnpackArgs& args,
                         cudaStream_t stream) {
  if (shape.num_ranks == 1 || shape.num_tokens == 0) return cudaSuccess;
  const dim3 grid(NumBlocks(shape.num_tokens), shape.num_ranks - 1);
  return ForVector(shape.row_bytes, [&](auto vec) {
    UnpackRows<decltype(vec)><<<grid, kThreads, 0, stream>>>(shape, args);
    return cudaGetLastError();
  });
}

}  // namespace turbobus::moe::cuda

#include "moe/cuda/elements.cuh"
#include "moe/cuda/ragged.cuh"

namespace turbobus::moe::cuda {
namespace {

/// Which of this rank's slices a row of the operand has a place in, a bit each,
/// in shared memory of the warp.
struct Places {
  uint32_t* bits;
  int num_words;
  int count;           // Of set bits;
  int first;           // the first of them.
  uint32_t until_row;  // Rows before this one have the same places.
};

/// The whole warp takes part.
__device__ Places FindPlaces(const RaggedSizes& sizes, const RaggedPlan& plan,
                             uint32_t* bits, uint32_t row) {
  const int n = sizes.num_slices;
  const int each = n / sizes.num_ranks;
  Places places = {bits, (n + kWarpSize - 1) / kWarpSize, 0, 0, UINT32_MAX};
  __syncwarp();
  for (int word = 0; word < places.num_words; ++word) {
    const int mine = word * kWarpSize + Lane();
    bool is_here = false;
    uint32_t until = UINT32_MAX;
    if (mine < n) {
      const uint32_t begin = plan.input[mine];
      const uint32_t end = plan.input_end[mine];
      if (begin < end && begin > row) until = begin;
      if (begin <= row && end > row) {
        is_here = true;
        until = end;
      }
    }
    unsigned here = __ballot_sync(kAllLanes, is_here);
    places.until_row =
        min(places.until_row, __reduce_min_sync(kAllLanes, until));
    uint32_t kept = 0;
    while (here != 0) {
      const int bit = PopBit(here);
      const int slice = word * kWarpSize + bit;
      // Later arrivals at the same rank may have overwritten it there.
      const int destination = slice / each;
      const int64_t arrivals = int64_t{destination} * n;
      const uint32_t place = plan.output[slice] + (row - plan.input[slice]);
      const Cover cover =
          FindCover(plan.begin + arrivals, plan.end + arrivals,
                    sizes.rank * each + slice % each + 1, n, place);
      const uint32_t same_until = cover.end != 0 ? cover.end : cover.next;
      places.until_row = static_cast<uint32_t>(
          min(static_cast<uint64_t>(places.until_row),
              static_cast<uint64_t>(row) + (same_until - place)));
      if (cover.end != 0) continue;
      if (places.count++ == 0) places.first = slice;
      kept |= 1u << bit;
    }
    if (Lane() == 0) bits[word] = kept;
  }
  __syncwarp();
  return places;
}

template <typename T, int N>
struct Sum {
  using Acc = typename Arithmetic<T>::Acc;
  Acc value[N];

  /// Starts with the first row itself: minus zero stays minus zero.
  __device__ void Add(const Pack<T, N>& pack, bool is_first) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Acc element = Arithmetic<T>::Load(pack.element[i]);
      value[i] = is_first ? element : value[i] + element;
    }
  }
};

/// Adds `num_bytes` from each of the places; `source(slice)` is where its bytes
/// begin. The whole warp takes part.
template <typename T, int N, typename Source>
__device__ void AddPlaces(const Places& places, uint8_t* to, int64_t num_bytes,
                          Source source) {
  auto* const out = reinterpret_cast<Pack<T, N>*>(to);
  const int64_t num_packs = num_bytes / static_cast<int64_t>(sizeof(*out));
  for (int64_t i = Lane(); i < num_packs; i += kWarpSize) {
    Sum<T, N> sum;
    bool is_first = true;
    for (int word = 0; word < places.num_words; ++word) {
      for (unsigned bits = places.bits[word]; bits != 0;) {
        const int slice = word * kWarpSize + PopBit(bits);
        sum.Add(reinterpret_cast<const Pack<T, N>*>(source(slice))[i],
                is_first);
        is_first = false;
      }
    }
    out[i] = Pack<T, N>::From(sum.value);
  }
}

/// Whether all of a piece's addresses allow for words of 16 bytes.
template <typename Source>
__device__ bool IsAligned(const Places& places, const uint8_t* to,
                          int64_t num_bytes, Source source) {
  auto address =
      reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(num_bytes);
  for (int word = 0; word < places.num_words; ++word) {
    for (unsigned bits = places.bits[word]; bits != 0;) {
      const int slice = word * kWarpSize + PopBit(bits);
      address |= reinterpret_cast<uintptr_t>(source(slice));
    }
  }
  return address % 16 == 0;
}

/// Makes bytes [first, last) of a batch's result; one warp.
template <typename T>
__device__ void SumChunk(const RaggedSizes& sizes, const RaggedSumArgs& args,
                         const RaggedPlan& plan, uint32_t* bits, int64_t batch,
                         int64_t first, int64_t last) {
  constexpr int kWide = 16 / sizeof(T);
  const int64_t row_bytes = sizes.row_bytes;
  const int each = sizes.num_slices / sizes.num_ranks;
  uint8_t* const result = args.result + batch * sizes.operand_rows * row_bytes;
  const auto stop = static_cast<uint32_t>((last + row_bytes - 1) / row_bytes);
  for (auto row = static_cast<uint32_t>(first / row_bytes); row < stop;) {
    const Places places = FindPlaces(sizes, plan, bits, row);
    const uint32_t next = min(places.until_row, stop);
    const int64_t begin = max(static_cast<int64_t>(row) * row_bytes, first);
    const int64_t num_bytes =
        min(static_cast<int64_t>(next) * row_bytes, last) - begin;
    const auto source = [&](int slice) {
      const int64_t row_of_zero = static_cast<int64_t>(plan.output[slice]) -
                                  static_cast<int64_t>(plan.input[slice]);
      return args.cotangents.of[slice / each] +
             (batch * sizes.output_rows + row_of_zero) * row_bytes + begin;
    };
    uint8_t* const to = result + begin;
    if (places.count == 0) {
      ZeroBytes(to, num_bytes);
    } else if (places.count == 1) {
      CopyBytes(to, source(places.first), num_bytes);
    } else if (IsAligned(places, to, num_bytes, source)) {
      AddPlaces<T, kWide>(places, to, num_bytes, source);
    } else {
      AddPlaces<T, 1>(places, to, num_bytes, source);
    }
    row = next;
  }
}

template <typename T>
__global__ void __launch_bounds__(kRaggedThreads)
    SumRows(const __grid_constant__ RaggedSizes sizes,
            const __grid_constant__ RaggedSumArgs args) {
  extern __shared__ uint32_t shared[];  // [warps, words of bits]
  uint32_t* const bits =
      shared + WarpInBlock() * ((sizes.num_slices + kWarpSize - 1) / kWarpSize);
  const int64_t num_bytes = sizes.operand_rows * sizes.row_bytes;
  const int64_t num_chunks =
      (num_bytes + kRaggedChunkBytes - 1) / kRaggedChunkBytes;
  const int64_t num_indices = NumChunkIndices(num_chunks);
  for (int64_t batch = blockIdx.y; batch < sizes.num_batches;
       batch += gridDim.y) {
    const RaggedPlan plan(sizes,
                          static_cast<uint32_t*>(args.scratch) +
                              TableOf(sizes, batch) * RaggedPlan::Ints(sizes));
    for (int64_t i =
             static_cast<int64_t>(WarpInBlock()) * gridDim.x + blockIdx.x;
         i < num_indices; i += static_cast<int64_t>(gridDim.x) * kRaggedWarps) {
      const int64_t chunk = ChunkAt(i, num_chunks);
      if (chunk < 0) continue;
      SumChunk<T>(sizes, args, plan, bits, batch, chunk * kRaggedChunkBytes,
                  min((chunk + 1) * kRaggedChunkBytes, num_bytes));
    }
  }
}

template <typename T>
cudaError_t LaunchSumRows(const RaggedSizes& sizes, const RaggedSumArgs& args,
                          cudaStream_t stream) {
  const size_t shared_bytes = static_cast<size_t>(kRaggedWarps) *
                              ((sizes.num_slices + kWarpSize - 1) / kWarpSize) *
                              sizeof(uint32_t);
  SumRows<T><<<RaggedGrid(sizes), kRaggedThreads, shared_bytes, stream>>>(sizes,
                                                                          args);
  return cudaGetLastError();
}

}  // namespace

int64_t RaggedSumScratchBytes(const RaggedSizes& sizes) {
  return sizes.num_tables * RaggedPlan::Ints(sizes) *
         static_cast<int64_t>(sizeof(uint32_t));
}

cudaError_t LaunchRaggedSum(const RaggedSizes& sizes, DType dtype,
                            const RaggedSumArgs& args, cudaStream_t stream) {
  const cudaError_t error =
      LaunchRaggedPlan(sizes, args.tables, static_cast<uint32_t*>(args.scratch),
                       RaggedPlan::Ints(sizes), /*report=*/{}, stream);
  if (error != cudaSuccess) return error;
  switch (dtype) {
    case DType::kF32:
      return LaunchSumRows<float>(sizes, args, stream);
    case DType::kF64:
      return LaunchSumRows<double>(sizes, args, stream);
    case DType::kF16:
      return LaunchSumRows<__half>(sizes, args, stream);
    case DType::kBF16:
      return LaunchSumRows<__nv_bfloat16>(sizes, args, stream);
    case DType::kOther:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace turbobus::moe::cuda

#include <algorithm>

#include "moe/cuda/ragged.cuh"

namespace turbobus::moe::cuda {
namespace {

/// Slices up to which every block reads the tables itself: one launch less.
constexpr int kMaxSharedSlices = 256;
constexpr int kBlocksPerMultiprocessor = 2;

/// What comes to this rank, in the order of writing: by source, then slice.
struct Arrivals {
  int64_t* first_chunk;  // [n + 1]: chunks of the arrivals before.
  uint32_t* begin;       // Rows [begin, end) of the result;
  uint32_t* end;
  uint32_t* input;  // from this row of the source's operand on.

  __host__ __device__ static int64_t Bytes(int n) {
    const int64_t bytes = (int64_t{n} + 1) * 8 + int64_t{n} * 12;
    return (bytes + 7) / 8 * 8;
  }
  __device__ Arrivals(void* memory, int n)
      : first_chunk(static_cast<int64_t*>(memory)),
        begin(reinterpret_cast<uint32_t*>(first_chunk + n + 1)),
        end(begin + n),
        input(end + n) {}
};

/// One thread tells the host, unless a slice told of is still unread.
__device__ void Report(const RaggedSizes& sizes, const RaggedPullArgs& args,
                       int64_t batch, int index) {
  RaggedFault* const fault = args.fault;
  if (fault == nullptr || atomicCAS(&fault->state, RaggedFault::kNone,
                                    RaggedFault::kClaimed) != 0) {
    return;
  }
  const int each = sizes.num_slices / sizes.num_ranks;
  fault->rank = index / each;
  fault->slice = sizes.rank * each + index % each;
  const RawSlice raw = ReadRaw(sizes, args.tables, batch * TableInts(sizes),
                               fault->rank, fault->slice);
  fault->input_offset = raw.input_offset;
  fault->send_size = raw.send_size;
  fault->output_offset = raw.output_offset;
  fault->recv_size = raw.recv_size;
  fault->slices_per_rank = each;
  fault->batch = batch;
  fault->num_tables = sizes.num_tables;
  fault->operand_rows = sizes.operand_rows;
  fault->output_rows = sizes.output_rows;
  fault->serial = args.serial;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&fault->state) = RaggedFault::kReported;
}

/// Reads all ranks' tables. The whole block takes part.
__device__ void MakeArrivals(const RaggedSizes& sizes,
                             const RaggedPullArgs& args, int64_t table,
                             bool is_reporting, Arrivals arrivals) {
  __shared__ int first_misfit;
  const int n = sizes.num_slices;
  const int each = n / sizes.num_ranks;
  if (threadIdx.x == 0) first_misfit = n;
  __syncthreads();
  for (int k = threadIdx.x; k < n; k += blockDim.x) {
    const DeviceSlice slice =
        ToSlice(sizes, ReadRaw(sizes, args.tables, table * TableInts(sizes),
                               k / each, sizes.rank * each + k % each));
    if (!slice.fits) atomicMin(&first_misfit, k);
    arrivals.begin[k] = slice.output;
    arrivals.end[k] = slice.output + slice.size;
    arrivals.input[k] = slice.input;
  }
  __syncthreads();
  if (WarpInBlock() == 0) {
    int64_t before = 0;
    for (int base = 0; base < n; base += kWarpSize) {
      const int k = base + Lane();
      int64_t num_chunks = 0;
      if (k < n) {
        const int64_t bytes =
            static_cast<int64_t>(arrivals.end[k] - arrivals.begin[k]) *
            sizes.row_bytes;
        num_chunks = (bytes + kRaggedChunkBytes - 1) / kRaggedChunkBytes;
      }
      int64_t sum = num_chunks;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const int64_t other = __shfl_up_sync(kAllLanes, sum, offset);
        if (Lane() >= offset) sum += other;
      }
      if (k < n) arrivals.first_chunk[k] = before + sum - num_chunks;
      before += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    }
    if (Lane() == 0) arrivals.first_chunk[n] = before;
  }
  if (threadIdx.x == 0 && is_reporting && first_misfit < n) {
    Report(sizes, args, table, first_misfit);
  }
  __syncthreads();
}

/// Copies one chunk, but for what later arrivals overwrite; one warp.
__device__ void CopyChunk(const RaggedSizes& sizes, const RaggedPullArgs& args,
                          const Arrivals& arrivals, int64_t batch,
                          int64_t chunk) {
  const int n = sizes.num_slices;
  // The last arrival that begins at this chunk or before has it.
  int low = 0;
  for (int high = n; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (arrivals.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t row_bytes = sizes.row_bytes;
  const uint32_t begin = arrivals.begin[low];
  const uint32_t end = arrivals.end[low];
  const int source = low / (n / sizes.num_ranks);
  // Bytes from the beginning of the slice.
  const int64_t first = (chunk - arrivals.first_chunk[low]) * kRaggedChunkBytes;
  const int64_t last = min(first + kRaggedChunkBytes,
                           static_cast<int64_t>(end - begin) * row_bytes);
  const uint8_t* const from =
      args.operands.of[source] +
      (batch * sizes.operand_rows + arrivals.input[low]) * row_bytes;
  uint8_t* const to =
      args.result + (batch * sizes.output_rows + begin) * row_bytes;
  const uint32_t stop =
      begin + static_cast<uint32_t>((last + row_bytes - 1) / row_bytes);
  for (uint32_t row = begin + static_cast<uint32_t>(first / row_bytes);
       row < stop;) {
    const Cover cover =
        FindCover(arrivals.begin, arrivals.end, low + 1, n, row);
    if (cover.end != 0) {
      row = cover.end;
      continue;
    }
    const uint32_t next = min(cover.next, stop);
    const int64_t piece_first =
        max(static_cast<int64_t>(row - begin) * row_bytes, first);
    const int64_t piece_last =
        min(static_cast<int64_t>(next - begin) * row_bytes, last);
    CopyBytes(to + piece_first, from + piece_first, piece_last - piece_first);
    row = next;
  }
}

__global__ void __launch_bounds__(kRaggedThreads)
    PlanPull(const __grid_constant__ RaggedSizes sizes,
             const __grid_constant__ RaggedPullArgs args) {
  const int64_t bytes = Arrivals::Bytes(sizes.num_slices);
  for (int64_t table = blockIdx.x; table < sizes.num_tables;
       table += gridDim.x) {
    MakeArrivals(sizes, args, table, /*is_reporting=*/true,
                 Arrivals(static_cast<uint8_t*>(args.scratch) + table * bytes,
                          sizes.num_slices));
  }
}

template <bool kIsPlanned>
__global__ void __launch_bounds__(kRaggedThreads, kBlocksPerMultiprocessor)
    Pull(const __grid_constant__ RaggedSizes sizes,
         const __grid_constant__ RaggedPullArgs args) {
  extern __shared__ int64_t shared[];
  const int n = sizes.num_slices;
  for (int64_t batch = blockIdx.y; batch < sizes.num_batches;
       batch += gridDim.y) {
    const int64_t table = TableOf(sizes, batch);
    void* memory = shared;
    if constexpr (kIsPlanned) {
      memory = static_cast<uint8_t*>(args.scratch) + table * Arrivals::Bytes(n);
    }
    const Arrivals arrivals(memory, n);
    if constexpr (!kIsPlanned) {
      if (batch == blockIdx.y || sizes.num_tables > 1) {
        __syncthreads();
        // One block a table tells of misfits.
        MakeArrivals(sizes, args, table, blockIdx.x == 0 && batch == table,
                     arrivals);
      }
    }
    const int64_t num_chunks = arrivals.first_chunk[n];
    const int64_t num_indices = NumChunkIndices(num_chunks);
    for (int64_t i =
             static_cast<int64_t>(WarpInBlock()) * gridDim.x + blockIdx.x;
         i < num_indices; i += static_cast<int64_t>(gridDim.x) * kRaggedWarps) {
      const int64_t chunk = ChunkAt(i, num_chunks);
      if (chunk >= 0) CopyChunk(sizes, args, arrivals, batch, chunk);
    }
  }
}

}  // namespace

dim3 RaggedGrid(const RaggedSizes& sizes) {
  int device = 0;
  int num_multiprocessors = 1;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&num_multiprocessors,
                             cudaDevAttrMultiProcessorCount,
                             device) != cudaSuccess) {
    num_multiprocessors = 1;  // The launch will say what is wrong.
  }
  const int64_t num_blocks =
      int64_t{num_multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t y = std::min<int64_t>(sizes.num_batches, 32768);
  const int64_t x = std::max<int64_t>(1, num_blocks / y);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

int64_t RaggedPullScratchBytes(const RaggedSizes& sizes) {
  if (sizes.num_slices <= kMaxSharedSlices) return 0;
  return sizes.num_tables * Arrivals::Bytes(sizes.num_slices);
}

cudaError_t LaunchRaggedPull(const RaggedSizes& sizes,
                             const RaggedPullArgs& args, cudaStream_t stream) {
  const dim3 grid = RaggedGrid(sizes);
  if (sizes.num_slices <= kMaxSharedSlices) {
    Pull<false>
        <<<grid, kRaggedThreads, Arrivals::Bytes(sizes.num_slices), stream>>>(
            sizes, args);
    return cudaGetLastError();
  }
  const auto num_tables =
      static_cast<unsigned>(std::min<int64_t>(sizes.num_tables, 1 << 16));
  PlanPull<<<num_tables, kRaggedThreads, 0, stream>>>(sizes, args);
  Pull<true><<<grid, kRaggedThreads, 0, stream>>>(sizes, args);
  return cudaGetLastError();
}

}  // namespace turbobus::moe::cuda

#include <algorithm>

#include "moe/cuda/ragged.cuh"

namespace turbobus::moe::cuda {
namespace {

/// Arrivals of all ranks up to which every block reads the tables itself: two
/// launches less.
constexpr int64_t kMaxSharedArrivals = 1024;
/// Bytes of the result that a warp looks through for rows that nobody sends.
constexpr int64_t kZeroChunkBytes = 8 * kRaggedChunkBytes;

bool IsShared(const RaggedSizes& sizes) {
  return int64_t{sizes.num_ranks} * sizes.num_slices <= kMaxSharedArrivals;
}

/// A plan, and the chunks of this rank's slices.
struct PushPlan {
  int64_t* first_chunk;  // [n + 1]: chunks of the slices before.
  RaggedPlan plan;

  /// A multiple of eight.
  __host__ __device__ static int64_t Bytes(const RaggedSizes& sizes) {
    return (int64_t{sizes.num_slices} + 1) * 8 +
           (RaggedPlan::Ints(sizes) + 1) / 2 * 8;
  }
  __device__ PushPlan(const RaggedSizes& sizes, void* memory)
      : first_chunk(static_cast<int64_t*>(memory)),
        plan(sizes,
             reinterpret_cast<uint32_t*>(first_chunk + sizes.num_slices + 1)) {}

  /// After the plan is made; one warp.
  __device__ void CountChunks(const RaggedSizes& sizes) const {
    const int n = sizes.num_slices;
    int64_t before = 0;
    for (int base = 0; base < n; base += kWarpSize) {
      const int slice = base + Lane();
      int64_t num_chunks = 0;
      if (slice < n) {
        const int64_t num_bytes =
            static_cast<int64_t>(plan.input_end[slice] - plan.input[slice]) *
            sizes.row_bytes;
        num_chunks = (num_bytes + kRaggedChunkBytes - 1) / kRaggedChunkBytes;
      }
      int64_t sum = num_chunks;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const int64_t other = __shfl_up_sync(kAllLanes, sum, offset);
        if (Lane() >= offset) sum += other;
      }
      if (slice < n) first_chunk[slice] = before + sum - num_chunks;
      before += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    }
    if (Lane() == 0) first_chunk[n] = before;
  }

  /// The slice that has a chunk: the last that begins at it or before.
  __device__ int SliceOf(const RaggedSizes& sizes, int64_t chunk) const {
    int low = 0;
    for (int high = sizes.num_slices; high - low > 1;) {
      const int middle = (low + high) / 2;
      if (first_chunk[middle] <= chunk) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

/// Makes the plan of a table in shared memory. The whole block takes part.
__device__ void MakeSharedPlan(const RaggedSizes& sizes,
                               const RaggedPushArgs& args, int64_t table,
                               bool is_reporting, const PushPlan& push) {
  __syncthreads();
  const int n = sizes.num_slices;
  for (int i = threadIdx.x; i < sizes.num_ranks * n; i += blockDim.x) {
    const bool fits = push.plan.Read(sizes, args.tables, table, i);
    if (!fits && is_reporting && i / n == sizes.rank) {
      ReportMisfit(sizes, args.tables, table, i, args.report);
    }
  }
  __syncthreads();
  if (WarpInBlock() == 0) push.CountChunks(sizes);
  __syncthreads();
}

/// Sends one chunk, but for what later arrivals overwrite; one warp.
__device__ void PushChunk(const RaggedSizes& sizes, const RaggedPushArgs& args,
                          const PushPlan& push, int64_t batch, int64_t chunk) {
  const RaggedPlan& plan = push.plan;
  const int n = sizes.num_slices;
  const int each = n / sizes.num_ranks;
  const int64_t row_bytes = sizes.row_bytes;
  const int slice = push.SliceOf(sizes, chunk);
  const int destination = slice / each;
  const int64_t arrivals = int64_t{destination} * n;
  const int later = sizes.rank * each + slice % each + 1;
  const uint32_t begin = plan.output[slice];
  const uint32_t num_rows = plan.input_end[slice] - plan.input[slice];
  // Bytes from the beginning of the slice.
  const int64_t first = (chunk - push.first_chunk[slice]) * kRaggedChunkBytes;
  const int64_t last = min(first + kRaggedChunkBytes,
                           static_cast<int64_t>(num_rows) * row_bytes);
  const uint8_t* const from =
      args.operand +
      (batch * sizes.operand_rows + plan.input[slice]) * row_bytes;
  uint8_t* const to = args.results.of[destination] +
                      (batch * sizes.output_rows + begin) * row_bytes;
  const uint32_t stop =
      begin + static_cast<uint32_t>((last + row_bytes - 1) / row_bytes);
  for (uint32_t row = begin + static_cast<uint32_t>(first / row_bytes);
       row < stop;) {
    const Cover cover =
        FindCover(plan.begin + arrivals, plan.end + arrivals, later, n, row);
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

/// Zeroes the rows in bytes [first, last) of this rank's result that nobody
/// sends; one warp.
__device__ void ZeroGaps(const RaggedSizes& sizes, const RaggedPushArgs& args,
                         const RaggedPlan& plan, int64_t batch, int64_t first,
                         int64_t last) {
  const int n = sizes.num_slices;
  const int64_t row_bytes = sizes.row_bytes;
  const int64_t arrivals = int64_t{sizes.rank} * n;
  uint8_t* const result =
      args.results.of[sizes.rank] + batch * sizes.output_rows * row_bytes;
  const auto stop = static_cast<uint32_t>((last + row_bytes - 1) / row_bytes);
  for (auto row = static_cast<uint32_t>(first / row_bytes); row < stop;) {
    const Cover cover =
        FindCover(plan.begin + arrivals, plan.end + arrivals, 0, n, row);
    if (cover.end != 0) {
      row = cover.end;
      continue;
    }
    const uint32_t next = min(cover.next, stop);
    const int64_t begin = max(static_cast<int64_t>(row) * row_bytes, first);
    ZeroBytes(result + begin,
              min(static_cast<int64_t>(next) * row_bytes, last) - begin);
    row = next;
  }
}

/// Counts the chunks of plans that are made; one warp a table.
__global__ void CountAllChunks(const __grid_constant__ RaggedSizes sizes,
                               void* scratch) {
  for (int64_t table = blockIdx.x; table < sizes.num_tables;
       table += gridDim.x) {
    const PushPlan push(
        sizes, static_cast<uint8_t*>(scratch) + table * PushPlan::Bytes(sizes));
    push.CountChunks(sizes);
  }
}

template <bool kIsPlanned>
__global__ void __launch_bounds__(kRaggedThreads)
    Push(const __grid_constant__ RaggedSizes sizes,
         const __grid_constant__ RaggedPushArgs args) {
  extern __shared__ int64_t shared[];
  const int64_t result_bytes = sizes.output_rows * sizes.row_bytes;
  const int64_t num_zero_chunks =
      args.is_onto_zeros
          ? (result_bytes + kZeroChunkBytes - 1) / kZeroChunkBytes
          : 0;
  for (int64_t batch = blockIdx.y; batch < sizes.num_batches;
       batch += gridDim.y) {
    const int64_t table = TableOf(sizes, batch);
    void* memory = shared;
    if constexpr (kIsPlanned) {
      memory =
          static_cast<uint8_t*>(args.scratch) + table * PushPlan::Bytes(sizes);
    }
    const PushPlan push(sizes, memory);
    if constexpr (!kIsPlanned) {
      if (batch == blockIdx.y || sizes.num_tables > 1) {
        // One block a table tells of misfits.
        MakeSharedPlan(sizes, args, table, blockIdx.x == 0 && batch == table,
                       push);
      }
    }
    const int64_t num_push_chunks = push.first_chunk[sizes.num_slices];
    const int64_t num_chunks = num_push_chunks + num_zero_chunks;
    const int64_t num_indices = NumChunkIndices(num_chunks);
    for (int64_t i =
             static_cast<int64_t>(WarpInBlock()) * gridDim.x + blockIdx.x;
         i < num_indices; i += static_cast<int64_t>(gridDim.x) * kRaggedWarps) {
      const int64_t chunk = ChunkAt(i, num_chunks);
      if (chunk < 0) continue;
      if (chunk < num_push_chunks) {
        PushChunk(sizes, args, push, batch, chunk);
      } else {
        const int64_t first = (chunk - num_push_chunks) * kZeroChunkBytes;
        ZeroGaps(sizes, args, push.plan, batch, first,
                 min(first + kZeroChunkBytes, result_bytes));
      }
    }
  }
}

}  // namespace

int64_t RaggedPushScratchBytes(const RaggedSizes& sizes) {
  return IsShared(sizes) ? 0 : sizes.num_tables * PushPlan::Bytes(sizes);
}

cudaError_t LaunchRaggedPush(const RaggedSizes& sizes,
                             const RaggedPushArgs& args, cudaStream_t stream) {
  const dim3 grid = RaggedGrid(sizes);
  const int64_t plan_bytes = PushPlan::Bytes(sizes);
  if (IsShared(sizes)) {
    Push<false><<<grid, kRaggedThreads, plan_bytes, stream>>>(sizes, args);
    return cudaGetLastError();
  }
  // The plan proper lies behind the counts of chunks.
  auto* const plans = reinterpret_cast<uint32_t*>(
      static_cast<int64_t*>(args.scratch) + sizes.num_slices + 1);
  const cudaError_t error =
      LaunchRaggedPlan(sizes, args.tables, plans, plan_bytes / sizeof(uint32_t),
                       args.report, stream);
  if (error != cudaSuccess) return error;
  const auto num_tables =
      static_cast<unsigned>(std::min<int64_t>(sizes.num_tables, 1 << 16));
  CountAllChunks<<<num_tables, kWarpSize, 0, stream>>>(sizes, args.scratch);
  Push<true><<<grid, kRaggedThreads, 0, stream>>>(sizes, args);
  return cudaGetLastError();
}

}  // namespace turbobus::moe::cuda

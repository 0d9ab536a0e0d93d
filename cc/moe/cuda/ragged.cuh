#ifndef TURBOBUS_MOE_CUDA_RAGGED_CUH_
#define TURBOBUS_MOE_CUDA_RAGGED_CUH_

#include <cstdint>

#include "moe/cuda/ragged.h"
#include "moe/cuda/rows.cuh"

// What both ragged kernels share. Rows are counted in uint32: an int32 offset
// and an int32 size add up to less than 2^32. A warp works on one chunk of the
// result's bytes at a time; a chunk is cut where slices begin or end.

namespace turbobus::moe::cuda {

/// Bytes of a chunk: enough to be worth a look at the slices, little enough
/// that a few MiB keep all warps busy.
inline constexpr int64_t kRaggedChunkBytes = 8192;
inline constexpr int kRaggedThreads = 512;
inline constexpr int kRaggedWarps = kRaggedThreads / kWarpSize;
/// Chunks are taken from so many places of the result in turn, so that all
/// sources are read all the time, instead of one after the other.
inline constexpr int64_t kRaggedLanes = 32;

/// The `index`-th chunk to work on of `num_chunks`; -1: none at this index.
/// Indices run to `NumChunkIndices`.
__device__ inline int64_t ChunkAt(int64_t index, int64_t num_chunks) {
  const int64_t part = (num_chunks + kRaggedLanes - 1) / kRaggedLanes;
  const int64_t chunk = index % kRaggedLanes * part + index / kRaggedLanes;
  return chunk < num_chunks ? chunk : -1;
}
__device__ inline int64_t NumChunkIndices(int64_t num_chunks) {
  return (num_chunks + kRaggedLanes - 1) / kRaggedLanes * kRaggedLanes;
}

/// A slice in rows; `size` 0: it moves nothing.
struct DeviceSlice {
  uint32_t input = 0;
  uint32_t size = 0;
  uint32_t output = 0;
  bool fits = true;
};

struct RawSlice {
  int32_t input_offset;
  int32_t send_size;
  int32_t output_offset;
  int32_t recv_size;
};

/// Slice `slice` of rank `source`. `at` is where the batch's table begins.
__device__ inline RawSlice ReadRaw(const RaggedSizes& sizes,
                                   const Peers<const int32_t>& tables,
                                   int64_t at, int source, int slice) {
  const int each = sizes.num_slices / sizes.num_ranks;
  const int32_t* const table = tables.of[source] + at;
  const int32_t* const receiver = tables.of[slice / each] + at;
  return {table[slice], table[sizes.num_slices + slice],
          table[2 * sizes.num_slices + slice],
          receiver[3 * sizes.num_slices + source * each + slice % each]};
}

/// The same judgement as `CheckRaggedSlice`.
__device__ inline DeviceSlice ToSlice(const RaggedSizes& sizes,
                                      const RawSlice& raw) {
  const int64_t size = raw.send_size;
  const auto leaves = [size](int64_t begin, int64_t num_rows) {
    return begin < 0 || (size > 0 && begin + size > num_rows);
  };
  if (size < 0 || leaves(raw.input_offset, sizes.operand_rows) ||
      leaves(raw.output_offset, sizes.output_rows) || raw.recv_size != size) {
    return {.fits = false};
  }
  return {.input = static_cast<uint32_t>(raw.input_offset),
          .size = static_cast<uint32_t>(size),
          .output = static_cast<uint32_t>(raw.output_offset)};
}

__device__ inline int64_t TableOf(const RaggedSizes& sizes, int64_t batch) {
  return sizes.num_tables == 1 ? 0 : batch;
}
__device__ inline int64_t TableInts(const RaggedSizes& sizes) {
  return int64_t{4} * sizes.num_slices;
}

/// All that a rank must know of the slices of one table.
struct RaggedPlan {
  // Of all that arrives at rank d, in the order of writing (by source, then
  // slice): rows [begin, end) of its result, `[num_ranks, num_slices]`.
  uint32_t* begin;
  uint32_t* end;
  // This rank's slices, `[num_slices]`: rows [input, input_end) of the operand
  // go to row `output` on.
  uint32_t* input;
  uint32_t* input_end;
  uint32_t* output;

  __host__ __device__ static int64_t Ints(const RaggedSizes& sizes) {
    return (int64_t{2} * sizes.num_ranks + 3) * sizes.num_slices;
  }
  __device__ RaggedPlan(const RaggedSizes& sizes, uint32_t* memory)
      : begin(memory),
        end(begin + int64_t{sizes.num_ranks} * sizes.num_slices),
        input(end + int64_t{sizes.num_ranks} * sizes.num_slices),
        input_end(input + sizes.num_slices),
        output(input_end + sizes.num_slices) {}

  /// Reads arrival `arrival` (of `[num_ranks, num_slices]`) out of the tables;
  /// one thread. Returns whether it fits.
  __device__ bool Read(const RaggedSizes& sizes,
                       const Peers<const int32_t>& tables, int64_t table,
                       int arrival) const {
    const int n = sizes.num_slices;
    const int each = n / sizes.num_ranks;
    const int destination = arrival / n;
    const int source = arrival % n / each;
    const int mine = destination * each + arrival % each;
    const DeviceSlice slice = ToSlice(
        sizes, ReadRaw(sizes, tables, table * TableInts(sizes), source, mine));
    begin[arrival] = slice.output;
    end[arrival] = slice.output + slice.size;
    if (source == sizes.rank) {
      input[mine] = slice.input;
      input_end[mine] = slice.input + slice.size;
      output[mine] = slice.output;
    }
    return slice.fits;
  }
};

/// Makes the plans of all tables in device memory, the next one `plan_ints`
/// behind each, and tells of misfits among what arrives at this rank.
cudaError_t LaunchRaggedPlan(const RaggedSizes& sizes,
                             const Peers<const int32_t>& tables,
                             uint32_t* plans, int64_t plan_ints,
                             const RaggedReport& report, cudaStream_t stream);

/// Tells the host of a slice that does not fit, unless one told of is still
/// unread; one thread.
__device__ inline void ReportMisfit(const RaggedSizes& sizes,
                                    const Peers<const int32_t>& tables,
                                    int64_t table, int arrival,
                                    const RaggedReport& report) {
  RaggedFault* const fault = report.fault;
  if (fault == nullptr || atomicCAS(&fault->state, RaggedFault::kNone,
                                    RaggedFault::kClaimed) != 0) {
    return;
  }
  const int each = sizes.num_slices / sizes.num_ranks;
  fault->rank = arrival % sizes.num_slices / each;
  fault->slice = arrival / sizes.num_slices * each + arrival % each;
  const RawSlice raw = ReadRaw(sizes, tables, table * TableInts(sizes),
                               fault->rank, fault->slice);
  fault->input_offset = raw.input_offset;
  fault->send_size = raw.send_size;
  fault->output_offset = raw.output_offset;
  fault->recv_size = raw.recv_size;
  fault->slices_per_rank = each;
  fault->batch = table;
  fault->num_tables = sizes.num_tables;
  fault->operand_rows = sizes.operand_rows;
  fault->output_rows = sizes.output_rows;
  fault->serial = report.serial;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&fault->state) = RaggedFault::kReported;
}

/// What intervals [begin[j], end[j]), j in [first, last), do to a row.
struct Cover {
  uint32_t end = 0;  // If a row is covered: until here by one interval. Else 0.
  uint32_t next = 0;  // If not: the next row where an interval begins.
};

/// The whole warp takes part. Empty intervals cover nothing.
__device__ inline Cover FindCover(const uint32_t* begin, const uint32_t* end,
                                  int first, int last, uint32_t row) {
  uint32_t covered_to = 0;
  uint32_t next = UINT32_MAX;
  for (int j = first + Lane(); j < last; j += kWarpSize) {
    const uint32_t b = begin[j];
    const uint32_t e = end[j];
    if (b >= e) continue;
    if (b > row) {
      next = min(next, b);
    } else if (e > row) {
      covered_to = max(covered_to, e);
    }
  }
  return {__reduce_max_sync(kAllLanes, covered_to),
          __reduce_min_sync(kAllLanes, next)};
}

/// Copies whole words. The whole warp takes part.
template <typename Vec>
__device__ inline void CopyWords(Vec* to, const Vec* from, int64_t num_words) {
  constexpr int kUnroll = 4;
  int64_t i = Lane();
  for (; i + (kUnroll - 1) * kWarpSize < num_words; i += kUnroll * kWarpSize) {
    Vec part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      part[u] = __ldcs(from + i + u * kWarpSize);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) to[i + u * kWarpSize] = part[u];
  }
  for (; i < num_words; i += kWarpSize) to[i] = __ldcs(from + i);
}

/// Copies bytes that lie alike in words of `Vec`. The whole warp takes part.
template <typename Vec>
__device__ inline void CopyAligned(uint8_t* to, const uint8_t* from,
                                   int64_t num_bytes) {
  constexpr int64_t kSize = sizeof(Vec);
  const int lane = Lane();
  const int64_t head =
      min(static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & (kSize - 1)),
          num_bytes);
  if (lane < head) to[lane] = from[lane];
  const int64_t num_words = (num_bytes - head) / kSize;
  CopyWords(reinterpret_cast<Vec*>(to + head),
            reinterpret_cast<const Vec*>(from + head), num_words);
  for (int64_t i = head + num_words * kSize + lane; i < num_bytes;
       i += kWarpSize) {
    to[i] = from[i];
  }
}

/// The same for bytes that lie differently even in words of four: each word
/// written is cut out of two words read. Words are read only where all of their
/// bytes are to be copied.
__device__ inline void CopyShifted(uint8_t* to, const uint8_t* from,
                                   int64_t num_bytes) {
  constexpr int kUnroll = 4;
  const int lane = Lane();
  // Up to the first word of `to` from whose source on whole words are ours.
  const auto to_word = -reinterpret_cast<uintptr_t>(to) & 3;
  const auto from_word = -reinterpret_cast<uintptr_t>(from) & 3;
  const int64_t head =
      min(static_cast<int64_t>(to_word >= from_word ? to_word : to_word + 4),
          num_bytes);
  if (lane < head) to[lane] = from[lane];
  to += head;
  from += head;
  num_bytes -= head;
  const unsigned shift = reinterpret_cast<uintptr_t>(from) & 3;
  const auto* in = reinterpret_cast<const uint32_t*>(from - shift);
  auto* out = reinterpret_cast<uint32_t*>(to);
  // Words in[0 .. num_words] are read; the last one ends within our bytes.
  const int64_t num_words = max((num_bytes + shift) / 4 - 1, int64_t{0});
  for (int64_t base = 0; base < num_words; base += kUnroll * kWarpSize) {
    uint32_t low[kUnroll];
    uint32_t high[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * kWarpSize + lane;
      if (i < num_words) {
        low[u] = in[i];
        high[u] = in[i + 1];
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * kWarpSize + lane;
      if (i < num_words) out[i] = __funnelshift_r(low[u], high[u], 8 * shift);
    }
  }
  for (int64_t i = num_words * 4 + lane; i < num_bytes; i += kWarpSize) {
    to[i] = from[i];
  }
}

/// Copies bytes that do not lie alike in words of 16. A function of its own:
/// the common case shall not pay for its registers.
__device__ __noinline__ inline void CopyNarrow(uint8_t* to, const uint8_t* from,
                                               int64_t num_bytes) {
  const auto apart =
      reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from);
  if (apart % 8 == 0) {
    CopyAligned<uint2>(to, from, num_bytes);
  } else if (apart % 4 == 0) {
    CopyAligned<uint32_t>(to, from, num_bytes);
  } else {
    CopyShifted(to, from, num_bytes);
  }
}

/// Copies bytes of any alignment. The whole warp takes part.
__device__ inline void CopyBytes(uint8_t* to, const uint8_t* from,
                                 int64_t num_bytes) {
  const auto apart =
      reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from);
  if (apart % 16 == 0) {
    CopyAligned<uint4>(to, from, num_bytes);
  } else {
    CopyNarrow(to, from, num_bytes);
  }
}

/// Zeroes bytes of any alignment. The whole warp takes part.
__device__ inline void ZeroBytes(uint8_t* to, int64_t num_bytes) {
  const int64_t head = min(
      static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 15), num_bytes);
  if (Lane() < head) to[Lane()] = 0;
  const int64_t num_words = (num_bytes - head) / 16;
  auto* const out = reinterpret_cast<uint4*>(to + head);
  for (int64_t i = Lane(); i < num_words; i += kWarpSize) out[i] = uint4{};
  for (int64_t i = head + num_words * 16 + Lane(); i < num_bytes;
       i += kWarpSize) {
    to[i] = 0;
  }
}

/// A block a multiprocessor, which is as much as NVLink and the device's memory
/// can take: x shares the chunks of a batch, y the batches.
dim3 RaggedGrid(const RaggedSizes& sizes);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RAGGED_CUH_

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

/// Copies bytes that lie alike in words of `Vec`. The whole warp takes part.
template <typename Vec>
__device__ inline void CopyAligned(uint8_t* to, const uint8_t* from,
                                   int64_t num_bytes) {
  constexpr int kUnroll = 4;
  constexpr int64_t kSize = sizeof(Vec);
  const int lane = Lane();
  const int64_t head =
      min(static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & (kSize - 1)),
          num_bytes);
  if (lane < head) to[lane] = from[lane];
  to += head;
  from += head;
  num_bytes -= head;
  const int64_t num_vecs = num_bytes / kSize;
  const auto* in = reinterpret_cast<const Vec*>(from);
  auto* out = reinterpret_cast<Vec*>(to);
  for (int64_t base = 0; base < num_vecs; base += kUnroll * kWarpSize) {
    Vec part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * kWarpSize + lane;
      if (i < num_vecs) part[u] = __ldcs(in + i);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * kWarpSize + lane;
      if (i < num_vecs) out[i] = part[u];
    }
  }
  const int64_t tail = num_vecs * kSize;
  if (lane < num_bytes - tail) to[tail + lane] = from[tail + lane];
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

/// Copies bytes of any alignment. The whole warp takes part.
__device__ inline void CopyBytes(uint8_t* to, const uint8_t* from,
                                 int64_t num_bytes) {
  const auto apart =
      reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from);
  if (apart % 16 == 0) {
    CopyAligned<uint4>(to, from, num_bytes);
  } else if (apart % 8 == 0) {
    CopyAligned<uint2>(to, from, num_bytes);
  } else if (apart % 4 == 0) {
    CopyAligned<uint32_t>(to, from, num_bytes);
  } else {
    CopyShifted(to, from, num_bytes);
  }
}

/// A grid of blocks that fill the device: x shares the chunks of a batch, y the
/// batches.
dim3 RaggedGrid(const RaggedSizes& sizes);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RAGGED_CUH_

#ifndef TURBOBUS_MOE_CUDA_ELEMENTS_CUH_
#define TURBOBUS_MOE_CUDA_ELEMENTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "moe/cuda/rows.cuh"

// Elements as the kernels calculate with them.

namespace turbobus::moe::cuda {

template <typename T>
struct Arithmetic {
  using Acc = float;
  __device__ static float Load(T value) { return static_cast<float>(value); }
  __device__ static T Store(float value) { return static_cast<T>(value); }
};
template <>
struct Arithmetic<double> {
  using Acc = double;
  __device__ static double Load(double value) { return value; }
  __device__ static double Store(double value) { return value; }
};
template <>
struct Arithmetic<__half> {
  using Acc = float;
  __device__ static float Load(__half value) { return __half2float(value); }
  __device__ static __half Store(float value) { return __float2half_rn(value); }
};
template <>
struct Arithmetic<__nv_bfloat16> {
  using Acc = float;
  __device__ static float Load(__nv_bfloat16 value) {
    return __bfloat162float(value);
  }
  __device__ static __nv_bfloat16 Store(float value) {
    return __float2bfloat16_rn(value);
  }
};

/// What so many bytes are loaded as.
template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<2> {
  using Type = uint16_t;
};
template <>
struct WordsOf<4> {
  using Type = uint32_t;
};
template <>
struct WordsOf<8> {
  using Type = uint2;
};
template <>
struct WordsOf<16> {
  using Type = uint4;
};

/// N elements that are loaded and stored at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  static constexpr int kSize = N;
  using Element = T;
  using Acc = typename Arithmetic<T>::Acc;
  /// The elements before they are looked at: half the registers of halves.
  using Words = typename WordsOf<sizeof(T) * N>::Type;
  T element[N];

  __device__ static Pack Of(const Words& words) {
    Pack pack;
    memcpy(&pack, &words, sizeof(pack));
    return pack;
  }
  __device__ void AddTo(Acc (&sum)[N], Acc scale) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum[i] += scale * Arithmetic<T>::Load(element[i]);
    }
  }
  __device__ static Pack From(const Acc (&sum)[N], Acc scale = 1) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      pack.element[i] = Arithmetic<T>::Store(scale * sum[i]);
    }
    return pack;
  }
  __device__ Acc Dot(const Acc (&other)[N]) const {
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum += Arithmetic<T>::Load(element[i]) * other[i];
    }
    return sum;
  }
};

/// Calls `launch` with a `Pack` of the dtype's elements, the widest that rows
/// of `row_bytes` are made of.
template <typename Launch>
cudaError_t ForPack(DType dtype, int64_t row_bytes, Launch launch) {
  const bool is_wide = row_bytes % 16 == 0;
  switch (dtype) {
    case DType::kF32:
      return is_wide ? launch(Pack<float, 4>{}) : launch(Pack<float, 1>{});
    case DType::kF64:
      return is_wide ? launch(Pack<double, 2>{}) : launch(Pack<double, 1>{});
    case DType::kF16:
      return is_wide ? launch(Pack<__half, 8>{}) : launch(Pack<__half, 1>{});
    case DType::kBF16:
      return is_wide ? launch(Pack<__nv_bfloat16, 8>{})
                     : launch(Pack<__nv_bfloat16, 1>{});
    case DType::kOther:
      break;
  }
  return cudaErrorInvalidValue;
}

/// Vectors of a row that one lane takes at once. A warp has few loads on their
/// way when each waits for the arithmetic on the one before, too few to keep
/// the memory busy: so load a whole batch first, then calculate, then store.
/// `kWide`: how many, of 16 bytes; single elements take fewer registers.
template <typename Pack, int kWide>
struct Batch {
  static constexpr int kNumVecs = Pack::kSize > 1 ? kWide : 8;
  using Words = typename Pack::Words[kNumVecs];

  int64_t first;
  int64_t end;

  /// Calls `body(u, vec)` for each vector, the batch's u-th.
  template <typename Body>
  __device__ void Each(Body body) const {
#pragma unroll
    for (int u = 0; u < kNumVecs; ++u) {
      const int64_t vec = first + u * kWarpSize;
      if (vec < end) body(u, vec);
    }
  }
  __device__ void Load(const uint8_t* row, Words& words) const {
    const auto* from = reinterpret_cast<const typename Pack::Words*>(row);
    Each([&](int u, int64_t vec) { words[u] = from[vec]; });
  }
};

/// Calls `body` with the batches of a row, or of the grid's z-th part of it,
/// for a whole warp: lanes past the end have empty ones and take part in the
/// shuffles.
template <typename Pack, int kWide, typename Body>
__device__ inline void ForBatches(int64_t row_bytes, Body body) {
  using RowBatch = Batch<Pack, kWide>;
  const int64_t num_vecs = row_bytes / static_cast<int64_t>(sizeof(Pack));
  const int64_t num_steps = (num_vecs + kWarpSize - 1) / kWarpSize;
  const int64_t per_part = (num_steps + gridDim.z - 1) / gridDim.z * kWarpSize;
  const int64_t begin = blockIdx.z * per_part;
  const int64_t end = min(begin + per_part, num_vecs);
  for (int64_t vec = begin; vec < end; vec += RowBatch::kNumVecs * kWarpSize) {
    body(RowBatch{vec + Lane(), end});
  }
}

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_ELEMENTS_CUH_

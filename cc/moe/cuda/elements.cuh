#ifndef TURBOBUS_MOE_CUDA_ELEMENTS_CUH_
#define TURBOBUS_MOE_CUDA_ELEMENTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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

/// N elements that are loaded and stored at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  static constexpr int kSize = N;
  using Element = T;
  using Acc = typename Arithmetic<T>::Acc;
  T element[N];

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

/// The vectors of a row, or of the grid's z-th part of it, for a whole warp:
/// those past the end are -1, so that all lanes take part in the shuffles.
template <typename Body>
__device__ inline void ForVectors(int64_t num_vecs, Body body) {
  const int64_t num_steps = (num_vecs + kWarpSize - 1) / kWarpSize;
  const int64_t per_part = (num_steps + gridDim.z - 1) / gridDim.z;
  const int64_t begin = blockIdx.z * per_part;
  const int64_t end = min(begin + per_part, num_steps);
  for (int64_t step = begin; step < end; ++step) {
    const int64_t vec = step * kWarpSize + Lane();
    body(vec < num_vecs ? vec : -1);
  }
}

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_ELEMENTS_CUH_

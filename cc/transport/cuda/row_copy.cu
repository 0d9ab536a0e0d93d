#include <algorithm>
#include <cstdint>

#include "transport/cuda/row_copy.h"

namespace turbobus::transport::cuda {
namespace {

constexpr int kThreads = 512;
/// Four blocks of 512 threads with eight loads each in flight fill a PCIe 5.0
/// x16 link (2 x H200, driver 580.159.04, 2026-11-30: 50.7 GB/s in, 52.1 out;
/// 64 blocks: 51.1, 52.3). More would only be in the way of other kernels.
constexpr int kMaxBlocks = 4;
constexpr int kUnroll = 8;

/// A piece's place in the stack is found by division, which one contiguous row
/// does without.
template <typename T, bool kIsContiguous>
__global__ void __launch_bounds__(kThreads) RowCopyKernel(RowCopy copy) {
  const int index = min(max(*copy.index, 0), copy.num_rows - 1);
  if (copy.seen != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *static_cast<volatile int32_t*>(copy.seen) = index + 1;
  }
  if (index == copy.skip_index) return;

  T* const row = reinterpret_cast<T*>(copy.row);
  T* const stack = reinterpret_cast<T*>(
      copy.stack + static_cast<int64_t>(index) * copy.piece_bytes);
  const int64_t piece = copy.piece_bytes / static_cast<int64_t>(sizeof(T));
  const int64_t stride = copy.stride_bytes / static_cast<int64_t>(sizeof(T));
  const int64_t end = copy.end_bytes / static_cast<int64_t>(sizeof(T));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kUnroll;
  const auto in_stack = [&](int64_t i) -> T* {
    if constexpr (kIsContiguous) return stack + i;
    return stack + i / piece * stride + i % piece;
  };
  for (int64_t base = copy.begin_bytes / static_cast<int64_t>(sizeof(T)) +
                      static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll +
                      threadIdx.x;
       base < end; base += step) {
    T values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * kThreads;
      if (i < end) values[u] = __ldcs(copy.is_store ? row + i : in_stack(i));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * kThreads;
      if (i < end) __stcs(copy.is_store ? in_stack(i) : row + i, values[u]);
    }
  }
}

__global__ void NothingKernel() {}

template <typename T>
void Launch(const RowCopy& copy, cudaStream_t stream) {
  const int64_t elements =
      (copy.end_bytes - copy.begin_bytes) / static_cast<int64_t>(sizeof(T));
  const int64_t per_block = static_cast<int64_t>(kThreads) * kUnroll;
  const int blocks = static_cast<int>(std::clamp<int64_t>(
      (elements + per_block - 1) / per_block, 1, kMaxBlocks));
  if (copy.num_pieces == 1) {
    RowCopyKernel<T, true><<<blocks, kThreads, 0, stream>>>(copy);
  } else {
    RowCopyKernel<T, false><<<blocks, kThreads, 0, stream>>>(copy);
  }
}

template <typename T>
cudaError_t Load() {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, RowCopyKernel<T, true>);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, RowCopyKernel<T, false>);
}

}  // namespace

cudaError_t LaunchRowCopy(const RowCopy& copy, cudaStream_t stream) {
  const uint64_t bits = reinterpret_cast<uint64_t>(copy.stack) |
                        reinterpret_cast<uint64_t>(copy.row) |
                        static_cast<uint64_t>(copy.piece_bytes) |
                        static_cast<uint64_t>(copy.stride_bytes) |
                        static_cast<uint64_t>(copy.begin_bytes) |
                        static_cast<uint64_t>(copy.end_bytes);
  if (bits % 16 == 0) {
    Launch<uint4>(copy, stream);
  } else if (bits % 8 == 0) {
    Launch<uint2>(copy, stream);
  } else if (bits % 4 == 0) {
    Launch<unsigned int>(copy, stream);
  } else if (bits % 2 == 0) {
    Launch<unsigned short>(copy, stream);
  } else {
    Launch<unsigned char>(copy, stream);
  }
  return cudaGetLastError();
}

cudaError_t LaunchNothing(cudaStream_t stream) {
  NothingKernel<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

cudaError_t LoadKernels() {
  cudaFuncAttributes attributes;
  for (const cudaError_t error :
       {Load<uint4>(), Load<uint2>(), Load<unsigned int>(),
        Load<unsigned short>(), Load<unsigned char>(),
        cudaFuncGetAttributes(&attributes, NothingKernel)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace turbobus::transport::cuda

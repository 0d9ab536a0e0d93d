#include <algorithm>

#include "moe/cuda/ragged.cuh"

namespace turbobus::moe::cuda {
namespace {

/// One thread an arrival of any rank.
__global__ void MakePlans(const __grid_constant__ RaggedSizes sizes,
                          const __grid_constant__ Peers<const int32_t> tables,
                          uint32_t* plans, int64_t plan_ints,
                          RaggedReport report) {
  const int64_t num_arrivals = int64_t{sizes.num_ranks} * sizes.num_slices;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < num_arrivals * sizes.num_tables; i += num_threads) {
    const int64_t table = i / num_arrivals;
    const auto arrival = static_cast<int>(i % num_arrivals);
    const RaggedPlan plan(sizes, plans + table * plan_ints);
    const bool fits = plan.Read(sizes, tables, table, arrival);
    if (!fits && arrival / sizes.num_slices == sizes.rank) {
      ReportMisfit(sizes, tables, table, arrival, report);
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
  const int64_t y = std::min<int64_t>(sizes.num_batches, 32768);
  const int64_t x = std::max<int64_t>(1, num_multiprocessors / y);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

cudaError_t LaunchRaggedPlan(const RaggedSizes& sizes,
                             const Peers<const int32_t>& tables,
                             uint32_t* plans, int64_t plan_ints,
                             const RaggedReport& report, cudaStream_t stream) {
  const int64_t num_arrivals =
      sizes.num_tables * sizes.num_ranks * sizes.num_slices;
  const int64_t num_blocks =
      std::min<int64_t>((num_arrivals + kThreads - 1) / kThreads, 1024);
  MakePlans<<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(
      sizes, tables, plans, plan_ints, report);
  return cudaGetLastError();
}

}  // namespace turbobus::moe::cuda

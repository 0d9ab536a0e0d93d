#include "moe/cuda/kernels.h"

namespace turbobus::moe::cuda {
namespace {

// Each GPU has its own; they live as long as its context and begin as zeros.
__device__ unsigned long long counters[kNumTrafficCounters];

}  // namespace

cudaError_t TrafficCounters(unsigned long long** address) {
  return cudaGetSymbolAddress(reinterpret_cast<void**>(address), counters);
}

}  // namespace turbobus::moe::cuda

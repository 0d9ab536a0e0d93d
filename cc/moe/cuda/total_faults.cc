#include "moe/cuda/total_faults.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <new>
#include <string>

namespace turbobus::moe::cuda {

TotalFaults& TotalFaults::Process() {
  static auto* const faults = new TotalFaults;
  return *faults;
}

TotalFaults::TotalFaults() {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, kMaxDevices * sizeof(TotalFault),
                    cudaHostAllocPortable | cudaHostAllocMapped) !=
      cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  faults_ = static_cast<TotalFault*>(memory);
  for (int i = 0; i < kMaxDevices; ++i) new (faults_ + i) TotalFault;
}

TotalFault* TotalFaults::Of(int device) const {
  if (faults_ == nullptr || device < 0 || device >= kMaxDevices) return nullptr;
  return faults_ + device;
}

Status TotalFaults::Take(int device) {
  TotalFault* const fault = Of(device);
  if (fault == nullptr) return OkStatus();
  const std::atomic_ref<int32_t> state(fault->state);
  if (state.load(std::memory_order_acquire) != TotalFault::kReported) {
    return OkStatus();
  }
  const Status status = Internal(
      "an earlier exchange of GPU " + std::to_string(device) +
      " copied rows of " + std::to_string(fault->told) +
      " tokens to or from rank " + std::to_string(fault->peer) +
      ", where there are " + std::to_string(fault->found) +
      ": it took the slots of another dispatch for its own, and its results "
      "are wrong; please report the program");
  state.store(TotalFault::kNone, std::memory_order_release);
  return status;
}

}  // namespace turbobus::moe::cuda

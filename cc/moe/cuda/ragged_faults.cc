#include "moe/cuda/ragged_faults.h"

#include <atomic>
#include <new>
#include <string>

#include "moe/ragged_plan.h"

namespace turbobus::moe::cuda {
namespace {

Status Explain(const RaggedFault& fault) {
  const RaggedSlice slice = {.rank = fault.rank,
                             .slice = fault.slice,
                             .slices_per_rank = fault.slices_per_rank,
                             .input_offset = fault.input_offset,
                             .send_size = fault.send_size,
                             .output_offset = fault.output_offset,
                             .recv_size = fault.recv_size};
  const Status status =
      CheckRaggedSlice(slice, fault.operand_rows, fault.output_rows);
  if (status.ok()) return Internal("ragged_all_to_all: unreadable fault");
  return InvalidArgument(
      (fault.num_tables > 1 ? "batch " + std::to_string(fault.batch) + ": "
                            : "") +
      std::string(status.message()) +
      "; found on the GPU in an earlier call, in which the slice moved no row");
}

}  // namespace

RaggedFaults& RaggedFaults::Process() {
  static auto* const faults = new RaggedFaults;
  return *faults;
}

RaggedFaults::RaggedFaults() {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, kMaxDevices * sizeof(RaggedFault),
                    cudaHostAllocPortable | cudaHostAllocMapped) !=
      cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  faults_ = static_cast<RaggedFault*>(memory);
  for (int i = 0; i < kMaxDevices; ++i) new (faults_ + i) RaggedFault;
}

StatusOr<RaggedReport> RaggedFaults::Begin(int device) {
  const std::lock_guard lock(mutex_);
  if (faults_ == nullptr || device < 0 || device >= kMaxDevices) {
    return RaggedReport{};
  }
  RaggedFault& fault = faults_[device];
  const std::atomic_ref<int32_t> state(fault.state);
  const int64_t serial = next_serial_++;
  if (state.load(std::memory_order_acquire) == RaggedFault::kReported) {
    const bool is_news = fault.serial >= told_before_;
    const Status status = is_news ? Explain(fault) : OkStatus();
    state.store(RaggedFault::kNone, std::memory_order_release);
    if (is_news) {
      told_before_ = serial;
      return status;
    }
  }
  return RaggedReport{.fault = &fault, .serial = serial};
}

}  // namespace turbobus::moe::cuda

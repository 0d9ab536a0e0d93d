#ifndef TURBOBUS_TRANSPORT_CUDA_CUDA_STREAMS_H_
#define TURBOBUS_TRANSPORT_CUDA_CUDA_STREAMS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/cuda/lender_lock.h"
#include "transport/streams.h"

namespace turbobus::transport::cuda {

enum class YieldKind : uint8_t {
  kNone = 0,
  /// The stream writes a word of its own and waits for it: the copy engine has
  /// to look up, and nothing can keep the wait from ending.
  kWord = 1,
  kKernel = 2,
};

struct GpuInfo {
  std::string name;
  /// Lower-case hex digits, as NVML writes them.
  std::string uuid;
  std::string pci_bus_id;
  int64_t memory_bytes = 0;
};

/// `Streams` of the CUDA runtime. A GPU is a CUDA ordinal of this process.
///
/// Uses the primary contexts, as XLA does. Methods may change the thread's
/// current device: callers that mind hold a `DeviceGuard`.
class CudaStreams : public Streams {
 public:
  /// UNAVAILABLE if there is no driver or no GPU; INVALID_ARGUMENT if
  /// JAX_TURBOBUS_PEER_ACCESS is no switch.
  static StatusOr<std::unique_ptr<CudaStreams>> Create();
  ~CudaStreams() override;

  const std::vector<GpuInfo>& gpus() const { return gpus_; }
  void set_yield_kind(YieldKind kind) { yield_kind_ = kind; }
  YieldKind yield_kind() const { return yield_kind_; }

  int num_gpus() const override { return static_cast<int>(gpus_.size()); }
  int64_t NowNs() const override;
  StatusOr<Stream> CreateStream(int gpu) override;
  StatusOr<Event> CreateEvent(int gpu, bool is_timed) override;
  StatusOr<void*> AllocateDevice(int gpu, int64_t size_bytes) override;
  StatusOr<void*> AllocatePinnedHost(int64_t size_bytes) override;
  void Free(void* memory) override;
  Status EnablePeerAccess(int relay, int gpu) override;
  Status LockLender(int gpu) override;
  Status Record(int gpu, Event event, Stream stream) override;
  Status Wait(Stream stream, Event event) override;
  using Streams::Copy;
  Status Copy(Stream stream, void* dst, const void* src, int64_t size_bytes,
              CopyKind kind) override;
  Status Yield(int gpu, Stream stream) override;
  Status CopyRow(int gpu, Stream stream, const RowCopy& copy) override;
  StatusOr<bool> IsDone(Event event) override;
  StatusOr<int64_t> ElapsedNs(Event from, Event to) override;
  MemoryKind KindOf(const void* pointer) override;
  Status CheckPeerAccess(int relay, const void* device_pointer) override;

 private:
  /// A word on the stream's GPU that the stream alone writes and waits for.
  /// XLA's streams get theirs when they first yield.
  struct Word {
    uint64_t address = 0;
    uint32_t value = 0;
  };

  CudaStreams() = default;
  Status PrepareGpu(int gpu);
  Status YieldByWord(int gpu, Stream stream);
  StatusOr<Word*> WordOf(int gpu, Stream stream);

  std::vector<GpuInfo> gpus_;
  YieldKind yield_kind_ = YieldKind::kWord;

  std::mutex mutex_;  // of what set-up makes
  std::vector<std::pair<int, cudaStream_t>> streams_;
  std::vector<std::pair<int, cudaEvent_t>> events_;
  std::map<void*, bool> memory_;  // whether it is on a device
  std::map<int, uint64_t> next_word_;
  std::map<int, uint64_t> words_end_;
  std::map<int, std::unique_ptr<LenderLock>> locks_;

  std::shared_mutex words_mutex_;  // of the map, not of what it holds
  /// By stream and GPU: XLA may end a stream, and another GPU's get its
  /// address.
  std::map<std::pair<Stream, int>, std::unique_ptr<Word>> words_;
};

}  // namespace turbobus::transport::cuda

#endif  // TURBOBUS_TRANSPORT_CUDA_CUDA_STREAMS_H_

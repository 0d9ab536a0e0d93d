#include "transport/cuda/cuda_streams.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "base/environment.h"
#include "transport/cuda/cuda_status.h"
#include "transport/cuda/device_guard.h"
#include "transport/cuda/driver.h"
#include "transport/cuda/peer_memory.h"
#include "transport/cuda/process_peer_access.h"
#include "transport/cuda/row_copy.h"

namespace turbobus::transport::cuda {
namespace {

/// Words of different streams lie on different cache lines.
constexpr uint64_t kWordStride = 64;
constexpr int64_t kWordsBytes = 1024 * kWordStride;

cudaStream_t ToStream(Stream stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t ToEvent(Event event) { return static_cast<cudaEvent_t>(event); }

std::string Uuid(const cudaUUID_t& uuid) {
  std::string text;
  for (int i = 0; i < 16; ++i) {
    std::array<char, 4> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x",
                  static_cast<unsigned char>(uuid.bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits.data();
  }
  return text;
}

}  // namespace

StatusOr<std::unique_ptr<CudaStreams>> CudaStreams::Create() {
  TB_RETURN_IF_ERROR(CheckSwitch("JAX_TURBOBUS_PEER_ACCESS"));
  const DeviceGuard guard;
  int num_gpus = 0;
  TB_CUDA_RETURN_IF_ERROR(cudaGetDeviceCount(&num_gpus));
  if (num_gpus == 0) return Unavailable("CUDA sees no GPU");
  std::unique_ptr<CudaStreams> streams(new CudaStreams);
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    cudaDeviceProp properties;
    TB_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, gpu));
    std::array<char, 32> pci{};
    TB_CUDA_RETURN_IF_ERROR(
        cudaDeviceGetPCIBusId(pci.data(), static_cast<int>(pci.size()), gpu));
    streams->gpus_.push_back({properties.name, Uuid(properties.uuid),
                              pci.data(),
                              static_cast<int64_t>(properties.totalGlobalMem)});
  }
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    TB_RETURN_IF_ERROR(streams->PrepareGpu(gpu));
  }
  return streams;
}

Status CudaStreams::PrepareGpu(int gpu) {
  TB_CUDA_RETURN_IF_ERROR(cudaSetDevice(gpu));
  TB_CUDA_RETURN_IF_ERROR(LoadKernels());
  TB_ASSIGN_OR_RETURN(void* const words, AllocateDevice(gpu, kWordsBytes));
  next_word_[gpu] = reinterpret_cast<uint64_t>(words);
  words_end_[gpu] = next_word_[gpu] + kWordsBytes;
  // Some virtual GPUs do not offer waits on memory.
  if (Driver::Get().stream_batch_mem_op == nullptr) {
    yield_kind_ = YieldKind::kKernel;
    return OkStatus();
  }
  TB_ASSIGN_OR_RETURN(const Stream stream, CreateStream(gpu));
  // On the stream that first waits for a word: zeroed between its write and its
  // wait, a word is waited for without end.
  TB_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(
      words, 0, static_cast<size_t>(kWordsBytes), ToStream(stream)));
  if (!YieldByWord(gpu, stream).ok() ||
      cudaStreamSynchronize(ToStream(stream)) != cudaSuccess) {
    (void)cudaGetLastError();
    yield_kind_ = YieldKind::kKernel;
  }
  return OkStatus();
}

CudaStreams::~CudaStreams() {
  const DeviceGuard guard;
  // Everything issued has to be over before its staging memory goes. Errors:
  // the process is ending, or the device is lost.
  for (const auto& [gpu, stream] : streams_) {
    (void)cudaSetDevice(gpu);
    (void)cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
  }
  for (const auto& [gpu, event] : events_) {
    (void)cudaSetDevice(gpu);
    (void)cudaEventDestroy(event);
  }
  for (const auto& [memory, is_device] : memory_) {
    (void)(is_device ? cudaFree(memory) : cudaFreeHost(memory));
  }
  (void)cudaGetLastError();
}

int64_t CudaStreams::NowNs() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

StatusOr<Stream> CudaStreams::CreateStream(int gpu) {
  const DeviceGuard guard;
  TB_CUDA_RETURN_IF_ERROR(cudaSetDevice(gpu));
  cudaStream_t stream = nullptr;
  TB_CUDA_RETURN_IF_ERROR(
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const std::lock_guard lock(mutex_);
  streams_.emplace_back(gpu, stream);
  return Stream{stream};
}

StatusOr<Event> CudaStreams::CreateEvent(int gpu, bool is_timed) {
  const DeviceGuard guard;
  TB_CUDA_RETURN_IF_ERROR(cudaSetDevice(gpu));
  cudaEvent_t event = nullptr;
  TB_CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(
      &event, is_timed ? cudaEventDefault : cudaEventDisableTiming));
  const std::lock_guard lock(mutex_);
  events_.emplace_back(gpu, event);
  return Event{event};
}

StatusOr<void*> CudaStreams::AllocateDevice(int gpu, int64_t size_bytes) {
  const DeviceGuard guard;
  TB_CUDA_RETURN_IF_ERROR(cudaSetDevice(gpu));
  void* memory = nullptr;
  const cudaError_t error =
      cudaMalloc(&memory, static_cast<size_t>(size_bytes));
  if (error != cudaSuccess) {
    return ToStatus(error, "cudaMalloc")
        .WithContext("GPU " + std::to_string(gpu) + ", " +
                     std::to_string(size_bytes) + " bytes");
  }
  const std::lock_guard lock(mutex_);
  memory_[memory] = true;
  return memory;
}

StatusOr<void*> CudaStreams::AllocatePinnedHost(int64_t size_bytes) {
  void* memory = nullptr;
  TB_CUDA_RETURN_IF_ERROR(cudaHostAlloc(
      &memory, static_cast<size_t>(size_bytes), cudaHostAllocPortable));
  const std::lock_guard lock(mutex_);
  memory_[memory] = false;
  return memory;
}

void CudaStreams::Free(void* memory) {
  bool is_device = false;
  {
    const std::lock_guard lock(mutex_);
    const auto it = memory_.find(memory);
    if (it == memory_.end()) return;
    is_device = it->second;
    memory_.erase(it);
  }
  (void)(is_device ? cudaFree(memory) : cudaFreeHost(memory));
}

Status CudaStreams::EnablePeerAccess(int relay, int gpu) {
  TB_RETURN_IF_ERROR(ProcessPeerAccess().Check(relay, gpu));
  return ProcessPeerAccess().Check(gpu, relay);
}

Status CudaStreams::LockLender(int gpu) {
  const std::lock_guard lock(mutex_);
  if (locks_.contains(gpu)) return OkStatus();
  TB_ASSIGN_OR_RETURN(locks_[gpu], LenderLock::Take(gpus_[gpu].uuid));
  return OkStatus();
}

Status CudaStreams::Record(int gpu, Event event, Stream stream) {
  static_cast<void>(gpu);
  TB_CUDA_RETURN_IF_ERROR(cudaEventRecord(ToEvent(event), ToStream(stream)));
  return OkStatus();
}

Status CudaStreams::Wait(Stream stream, Event event) {
  TB_CUDA_RETURN_IF_ERROR(
      cudaStreamWaitEvent(ToStream(stream), ToEvent(event), 0));
  return OkStatus();
}

Status CudaStreams::Copy(Stream stream, void* dst, const void* src,
                         int64_t size_bytes, CopyKind kind) {
  static constexpr cudaMemcpyKind kKinds[] = {
      cudaMemcpyDefault, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost,
      cudaMemcpyDeviceToDevice};
  TB_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(dst, src, static_cast<size_t>(size_bytes),
                      kKinds[static_cast<int>(kind)], ToStream(stream)));
  return OkStatus();
}

StatusOr<CudaStreams::Word*> CudaStreams::WordOf(int gpu, Stream stream) {
  {
    const std::shared_lock lock(words_mutex_);
    const auto it = words_.find({stream, gpu});
    if (it != words_.end()) return it->second.get();
  }
  uint64_t address = 0;
  {
    const std::lock_guard lock(mutex_);
    if (next_word_[gpu] >= words_end_[gpu]) {
      return ResourceExhausted(
          "no word is left for another stream to yield by");
    }
    address = next_word_[gpu];
    next_word_[gpu] += kWordStride;
  }
  const std::lock_guard lock(words_mutex_);
  std::unique_ptr<Word>& word = words_[{stream, gpu}];
  word = std::make_unique<Word>();
  word->address = address;
  return word.get();
}

Status CudaStreams::YieldByWord(int gpu, Stream stream) {
  const StatusOr<Word*> found = WordOf(gpu, stream);
  // It copies without a pause then, as XLA itself does.
  if (found.status().code() == StatusCode::kResourceExhausted)
    return OkStatus();
  if (!found.ok()) return found.status();
  Word* const word = *found;
  const uint32_t value = ++word->value;
  std::array<CUstreamBatchMemOpParams, 2> ops;
  std::memset(ops.data(), 0, sizeof(ops));
  ops[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  ops[0].writeValue.address = word->address;
  ops[0].writeValue.value = value;
  ops[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  ops[1].waitValue.address = word->address;
  ops[1].waitValue.value = value;
  ops[1].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  const CUresult result = Driver::Get().stream_batch_mem_op(
      static_cast<CUstream>(stream), ops.size(), ops.data(), 0);
  if (result == CUDA_SUCCESS) return OkStatus();
  return Internal("cuStreamBatchMemOp: error " + std::to_string(result));
}

Status CudaStreams::Yield(int gpu, Stream stream) {
  if (yield_kind_ == YieldKind::kNone) return OkStatus();
  TB_CUDA_RETURN_IF_ERROR(cudaSetDevice(gpu));
  if (yield_kind_ == YieldKind::kWord) return YieldByWord(gpu, stream);
  TB_CUDA_RETURN_IF_ERROR(LaunchNothing(ToStream(stream)));
  return OkStatus();
}

Status CudaStreams::CopyRow(int gpu, Stream stream, const RowCopy& copy) {
  TB_CUDA_RETURN_IF_ERROR(cudaSetDevice(gpu));
  TB_CUDA_RETURN_IF_ERROR(LaunchRowCopy(copy, ToStream(stream)));
  return OkStatus();
}

StatusOr<bool> CudaStreams::IsDone(Event event) {
  const cudaError_t error = cudaEventQuery(ToEvent(event));
  if (error == cudaSuccess) return true;
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  return ToStatus(error, "a GPU's earlier work failed: cudaEventQuery");
}

StatusOr<int64_t> CudaStreams::ElapsedNs(Event from, Event to) {
  float milliseconds = 0;
  TB_CUDA_RETURN_IF_ERROR(
      cudaEventElapsedTime(&milliseconds, ToEvent(from), ToEvent(to)));
  return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
}

MemoryKind CudaStreams::KindOf(const void* pointer) {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    (void)cudaGetLastError();
    return MemoryKind::kPageableHost;
  }
  switch (attributes.type) {
    case cudaMemoryTypeHost:
      return MemoryKind::kPinnedHost;
    case cudaMemoryTypeDevice:
      return MemoryKind::kDevice;
    default:
      return MemoryKind::kPageableHost;
  }
}

Status CudaStreams::CheckPeerAccess(int relay, const void* device_pointer) {
  return AskForPeerMemory(relay, device_pointer);
}

}  // namespace turbobus::transport::cuda

#include "moe/cuda/ring.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/environment.h"
#include "moe/cuda/mail.h"
#include "transport/cuda/device_guard.h"

namespace turbobus::moe::cuda {
namespace {

using transport::cuda::DeviceGuard;

constexpr int kMostSlots = 64;
constexpr int64_t kLeastSlotBytes = 64 << 10;
constexpr int64_t kMostSlotBytes = int64_t{1} << 30;
/// Slots start at multiples of it.
constexpr int64_t kSlotAlignment = 4096;

/// What `RingSize::SetMeasured` said last.
struct Measured {
  std::mutex mutex;
  RingSize size;
};

Measured& MeasuredSize() {
  static auto* const measured = new Measured;
  return *measured;
}

/// The value of an environment variable; `fallback` if it is not set.
StatusOr<int64_t> FromVariable(const std::string& name, int64_t least,
                               int64_t most, int64_t fallback) {
  const std::string text = EnvironmentText(name.c_str());
  if (text.empty()) return fallback;
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (end != text.c_str() && *end == '\0' && value >= least && value <= most) {
    return value;
  }
  return InvalidArgument(name + ": expected a number from " +
                         std::to_string(least) + " to " + std::to_string(most) +
                         ", got \"" + text + "\"");
}

StatusOr<cudaStream_t> MakeStream(int device) {
  TB_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device), "cudaSetDevice"));
  cudaStream_t stream = nullptr;
  TB_RETURN_IF_ERROR(
      FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
               "cudaStreamCreate"));
  return stream;
}

StatusOr<cudaEvent_t> MakeEvent(int device) {
  TB_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device), "cudaSetDevice"));
  cudaEvent_t event = nullptr;
  TB_RETURN_IF_ERROR(
      FromCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
               "cudaEventCreate"));
  return event;
}

/// Both ways; XLA does it too.
Status EnablePeerAccess(int a, int b) {
  for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    if (from == to) continue;
    TB_RETURN_IF_ERROR(FromCuda(cudaSetDevice(from), "cudaSetDevice"));
    const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      TB_RETURN_IF_ERROR(FromCuda(error, "cudaDeviceEnablePeerAccess"));
    }
  }
  return OkStatus();
}

StatusOr<SharedEvent> RecordOn(int device, cudaStream_t stream) {
  const DeviceGuard guard;
  TB_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device), "cudaSetDevice"));
  return EventPool::Process().Record(device, stream);
}

Status Wait(cudaStream_t stream, cudaEvent_t event) {
  return FromCuda(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

}  // namespace

StatusOr<RingSize> RingSize::FromEnvironment() {
  RingSize size;
  {
    const std::lock_guard lock(MeasuredSize().mutex);
    size = MeasuredSize().size;
  }
  TB_ASSIGN_OR_RETURN(const int64_t num_slots,
                      FromVariable("JAX_TURBOBUS_EXCHANGE_SLOTS", 1, kMostSlots,
                                   size.num_slots));
  size.num_slots = static_cast<int>(num_slots);
  TB_ASSIGN_OR_RETURN(
      size.slot_bytes,
      FromVariable("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", kLeastSlotBytes,
                   kMostSlotBytes, size.slot_bytes));
  return size;
}

Status RingSize::SetMeasured(RingSize size) {
  if (size.num_slots < 1 || size.num_slots > kMostSlots ||
      size.slot_bytes < kLeastSlotBytes || size.slot_bytes > kMostSlotBytes) {
    return InvalidArgument("no ring has " + std::to_string(size.num_slots) +
                           " slots of " + std::to_string(size.slot_bytes) +
                           " bytes");
  }
  const std::lock_guard lock(MeasuredSize().mutex);
  MeasuredSize().size = size;
  return OkStatus();
}

StatusOr<std::unique_ptr<Ring>> Ring::Create(int source,
                                             std::vector<int> readers,
                                             Path path, RingSize wanted) {
  const DeviceGuard guard;
  std::unique_ptr<Ring> ring(new Ring(source, std::move(readers), path));
  TB_RETURN_IF_ERROR(ring->Prepare(wanted));
  return ring;
}

Status Ring::Prepare(RingSize wanted) {
  for (const int reader : readers_) {
    TB_ASSIGN_OR_RETURN(receive_.emplace_back(), MakeStream(reader));
  }
  if (path_.kind == Path::Kind::kPeer) {
    for (const int reader : readers_) {
      TB_RETURN_IF_ERROR(EnablePeerAccess(source_, reader));
    }
    slot_bytes_ = wanted.slot_bytes;
    return OkStatus();
  }
  if (path_.kind == Path::Kind::kRelay) {
    TB_RETURN_IF_ERROR(EnablePeerAccess(source_, path_.relay));
    for (const int reader : readers_) {
      TB_RETURN_IF_ERROR(EnablePeerAccess(path_.relay, reader));
    }
  }
  TB_ASSIGN_OR_RETURN(send_, MakeStream(source_));
  return MakeSlots(wanted);
}

cudaError_t Ring::Allocate(int64_t size_bytes) {
  void* memory = nullptr;
  cudaError_t error = cudaSuccess;
  if (path_.kind == Path::Kind::kRelay) {
    error = cudaSetDevice(path_.relay);
    if (error == cudaSuccess) {
      error = cudaMalloc(&memory, static_cast<size_t>(size_bytes));
    }
  } else {
    error = cudaHostAlloc(&memory, static_cast<size_t>(size_bytes),
                          cudaHostAllocPortable);
  }
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return error;
  }
  memory_ = static_cast<uint8_t*>(memory);
  return cudaSuccess;
}

Status Ring::MakeSlots(RingSize wanted) {
  slot_bytes_ = (wanted.slot_bytes + kSlotAlignment - 1) / kSlotAlignment *
                kSlotAlignment;
  while (true) {
    const cudaError_t error = Allocate(slot_bytes_ * wanted.num_slots);
    if (error == cudaSuccess) break;
    if (slot_bytes_ / 2 < kLeastSlotBytes) {
      const int64_t bytes = slot_bytes_ * wanted.num_slots;
      if (path_.kind != Path::Kind::kRelay) return CannotPin(bytes, error);
      return ResourceExhausted(
          "no " + std::to_string(bytes) + " bytes of memory of GPU " +
          std::to_string(path_.relay) + " to relay an exchange (" +
          cudaGetErrorName(error) + ")");
    }
    slot_bytes_ = slot_bytes_ / 2 / kSlotAlignment * kSlotAlignment;
  }
  slots_.resize(wanted.num_slots);
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.data = memory_ + static_cast<int64_t>(i) * slot_bytes_;
    TB_ASSIGN_OR_RETURN(slot.written, MakeEvent(source_));
    for (const int reader : readers_) {
      TB_ASSIGN_OR_RETURN(slot.read.emplace_back(), MakeEvent(reader));
    }
  }
  return OkStatus();
}

Ring::~Ring() {
  // Errors: the device is lost, or the process is ending.
  const auto destroy = [](cudaStream_t stream) {
    if (stream == nullptr) return;
    (void)cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
  };
  destroy(send_);
  for (const cudaStream_t stream : receive_) destroy(stream);
  for (const Slot& slot : slots_) {
    if (slot.written != nullptr) (void)cudaEventDestroy(slot.written);
    for (const cudaEvent_t read : slot.read) (void)cudaEventDestroy(read);
  }
  if (memory_ != nullptr) {
    (void)(path_.kind == Path::Kind::kRelay ? cudaFree(memory_)
                                            : cudaFreeHost(memory_));
  }
  (void)cudaGetLastError();
}

Status Ring::Await(cudaEvent_t source_ready,
                   std::span<const cudaEvent_t> reader_ready) {
  for (size_t i = 0; i < receive_.size(); ++i) {
    TB_RETURN_IF_ERROR(Wait(receive_[i], reader_ready[i]));
    if (send_ == nullptr) TB_RETURN_IF_ERROR(Wait(receive_[i], source_ready));
  }
  return send_ == nullptr ? OkStatus() : Wait(send_, source_ready);
}

Status Ring::AwaitSource(cudaEvent_t source_ready) {
  if (send_ != nullptr) return Wait(send_, source_ready);
  for (const cudaStream_t stream : receive_) {
    TB_RETURN_IF_ERROR(Wait(stream, source_ready));
  }
  return OkStatus();
}

Status Ring::Copy(const void* from, std::span<void* const> to,
                  int64_t size_bytes) {
  const auto copy = [&](void* target, const void* source, cudaStream_t stream) {
    return FromCuda(
        cudaMemcpyAsync(target, source, static_cast<size_t>(size_bytes),
                        cudaMemcpyDefault, stream),
        "cudaMemcpyAsync");
  };
  const auto record = [](cudaEvent_t event, cudaStream_t stream) {
    return FromCuda(cudaEventRecord(event, stream), "cudaEventRecord");
  };
  if (slots_.empty()) {
    for (size_t i = 0; i < receive_.size(); ++i) {
      TB_RETURN_IF_ERROR(copy(to[i], from, receive_[i]));
    }
    return OkStatus();
  }
  const Slot& slot = slots_[next_];
  next_ = (next_ + 1) % slots_.size();
  // An event that was never recorded is no wait.
  for (const cudaEvent_t read : slot.read) {
    TB_RETURN_IF_ERROR(Wait(send_, read));
  }
  TB_RETURN_IF_ERROR(copy(slot.data, from, send_));
  TB_RETURN_IF_ERROR(record(slot.written, send_));
  for (size_t i = 0; i < receive_.size(); ++i) {
    TB_RETURN_IF_ERROR(Wait(receive_[i], slot.written));
    TB_RETURN_IF_ERROR(copy(to[i], slot.data, receive_[i]));
    TB_RETURN_IF_ERROR(record(slot.read[i], receive_[i]));
  }
  return OkStatus();
}

StatusOr<SharedEvent> Ring::RecordSent() {
  if (send_ != nullptr) return RecordOn(source_, send_);
  // There is one reader on a peer path: the last copy out is its last in.
  return RecordReceived(0);
}

StatusOr<SharedEvent> Ring::RecordReceived(int index) {
  return RecordOn(readers_[index], receive_[index]);
}

RingPool& RingPool::Process() {
  static auto* const pool = new RingPool;
  return *pool;
}

void RingPool::Return::operator()(Ring* ring) const {
  const std::lock_guard lock(pool->mutex_);
  pool->free_[pool->keys_.at(ring)].emplace_back(ring);
}

StatusOr<RingPool::Lease> RingPool::Take(int source, std::vector<int> readers,
                                         Path path,
                                         std::optional<RingSize> wanted) {
  const Key key = {source, readers, path.kind, path.relay};
  {
    const std::lock_guard lock(mutex_);
    std::vector<std::unique_ptr<Ring>>& unused = free_[key];
    if (!unused.empty()) {
      Ring* const ring = unused.back().release();
      unused.pop_back();
      return Lease(ring, Return{this});
    }
  }
  if (!wanted) {
    TB_ASSIGN_OR_RETURN(wanted, RingSize::FromEnvironment());
  }
  TB_ASSIGN_OR_RETURN(std::unique_ptr<Ring> ring,
                      Ring::Create(source, std::move(readers), path, *wanted));
  total_bytes_ += ring->size_bytes();
  const std::lock_guard lock(mutex_);
  keys_[ring.get()] = key;
  return Lease(ring.release(), Return{this});
}

}  // namespace turbobus::moe::cuda

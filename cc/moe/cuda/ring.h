#ifndef TURBOBUS_MOE_CUDA_RING_H_
#define TURBOBUS_MOE_CUDA_RING_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "moe/cuda/events.h"
#include "moe/cuda/wiring.h"

namespace turbobus::moe::cuda {

/// The slots of a ring.
struct RingSize {
  int num_slots = 3;
  int64_t slot_bytes = 4 << 20;

  /// JAX_TURBOBUS_EXCHANGE_SLOTS and JAX_TURBOBUS_EXCHANGE_SLOT_BYTES; what
  /// they leave open is as measured here, else as above. INVALID_ARGUMENT names
  /// the one that is no such number.
  static StatusOr<RingSize> FromEnvironment();

  /// Says what was measured on this machine, for rings made from now on.
  /// Thread-safe. INVALID_ARGUMENT if there cannot be such slots.
  static Status SetMeasured(RingSize size);
};

/// Copy engines' way from one GPU's memory into that of others, through a few
/// slots that are written and read in turn: so what is in flight stays small,
/// and in the CPU's cache. On a peer path there are no slots.
///
/// All is enqueued on streams of the ring's own, in the order of calls, from
/// any thread but one at a time. The ring must outlive what is enqueued.
class Ring {
 public:
  /// `readers`: CUDA ordinals, as `source`. If there is no room for slots of
  /// the wanted size they are made smaller. RESOURCE_EXHAUSTED if that does not
  /// help.
  static StatusOr<std::unique_ptr<Ring>> Create(int source,
                                                std::vector<int> readers,
                                                Path path, RingSize wanted);
  /// Waits for what is enqueued.
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int64_t block_bytes() const { return slot_bytes_; }
  /// Bytes of the slots.
  int64_t size_bytes() const {
    return slot_bytes_ * static_cast<int64_t>(slots_.size());
  }

  /// What is copied from now on is read after `source_ready`, and written into
  /// reader i's memory after `reader_ready[i]`.
  Status Await(cudaEvent_t source_ready,
               std::span<const cudaEvent_t> reader_ready);

  /// What is copied from now on is read after `source_ready`, too.
  Status AwaitSource(cudaEvent_t source_ready);

  /// Enqueues the copy of a block of at most `block_bytes`.
  Status Copy(const void* from, std::span<void* const> to, int64_t size_bytes);

  /// An event after which nothing of the source's memory is read.
  StatusOr<SharedEvent> RecordSent();
  /// An event after which reader `index` has everything.
  StatusOr<SharedEvent> RecordReceived(int index);

 private:
  struct Slot {
    uint8_t* data = nullptr;
    cudaEvent_t written = nullptr;
    std::vector<cudaEvent_t> read;  // By reader.
  };

  Ring(int source, std::vector<int> readers, Path path)
      : source_(source), readers_(std::move(readers)), path_(path) {}
  Status Prepare(RingSize wanted);
  Status MakeSlots(RingSize wanted);
  cudaError_t Allocate(int64_t size_bytes);

  const int source_;
  const std::vector<int> readers_;
  const Path path_;
  cudaStream_t send_ = nullptr;        // Of the source; none on a peer path.
  std::vector<cudaStream_t> receive_;  // Of the readers.
  uint8_t* memory_ = nullptr;
  int64_t slot_bytes_ = 0;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

/// Rings that nobody enqueues on. Thread-safe; never destroyed. There are as
/// many between two GPUs as calls once enqueued on at the same time.
class RingPool {
 public:
  /// Gives the ring back: what is enqueued stays in order.
  struct Return {
    RingPool* pool = nullptr;
    void operator()(Ring* ring) const;
  };
  using Lease = std::unique_ptr<Ring, Return>;

  static RingPool& Process();

  /// A ring that is free or, if none is, a new one: with slots of `wanted`, or
  /// as `RingSize::FromEnvironment` says.
  StatusOr<Lease> Take(int source, std::vector<int> readers, Path path,
                       std::optional<RingSize> wanted = std::nullopt);

  int64_t total_bytes() const { return total_bytes_; }

 private:
  struct Key {
    int source;
    std::vector<int> readers;
    Path::Kind kind;
    int relay;
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  std::atomic<int64_t> total_bytes_ = 0;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<Key, std::vector<std::unique_ptr<Ring>>> free_;
  std::map<const Ring*, Key> keys_;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_RING_H_

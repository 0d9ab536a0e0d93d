#ifndef TURBOBUS_TRANSPORT_STREAMS_H_
#define TURBOBUS_TRANSPORT_STREAMS_H_

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace turbobus::transport {

/// Handles of the machine behind `Streams` (on CUDA: cudaStream_t,
/// cudaEvent_t).
using Stream = void*;
using Event = void*;

enum class MemoryKind : uint8_t {
  kDevice = 0,
  /// Page-locked: copy engines and kernels of every GPU reach it.
  kPinnedHost = 1,
  kPageableHost = 2,
};

/// Between what a copy is; saves the runtime from looking it up.
enum class CopyKind : uint8_t { kAny = 0, kH2d = 1, kD2h = 2, kD2d = 3 };

/// A row of a stack whose number is known on the device only.
struct RowCopy {
  std::byte* stack = nullptr;
  std::byte* row = nullptr;
  /// Read in stream order; clamped to `[0, num_rows)`.
  const int32_t* index = nullptr;
  int32_t num_rows = 1;
  /// Row i is `num_pieces` runs of `piece_bytes`, `stride_bytes` apart, the
  /// first at `i * piece_bytes`; in `row` they lie one after another.
  int64_t piece_bytes = 0;
  int64_t num_pieces = 1;
  int64_t stride_bytes = 0;
  /// From the row into the stack, or from the stack into the row.
  bool is_store = false;
  /// Only these bytes of the row are copied.
  int64_t begin_bytes = 0;
  int64_t end_bytes = 0;
  /// If the index is this one, nothing is copied (it has been already).
  int32_t skip_index = -1;
  /// Pinned host memory that gets the clamped index + 1, or null.
  int32_t* seen = nullptr;

  int64_t row_bytes() const { return piece_bytes * num_pieces; }
};

/// A machine whose copies run on streams: what the stream engine drives.
///
/// Work on one stream runs in order, on different streams in any order that
/// events allow. Nothing here waits for the device, except where noted. All
/// methods may be called by any thread; a stream's work is ordered as its calls
/// are, so callers that share one agree among themselves. GPUs are numbered as
/// the runtime numbers them.
class Streams {
 public:
  virtual ~Streams() = default;

  virtual int num_gpus() const = 0;
  virtual int64_t NowNs() const = 0;

  // Set-up. These may wait for the device: never call them from a handler.
  virtual StatusOr<Stream> CreateStream(int gpu) = 0;
  /// Timed events can be given to `ElapsedNs`.
  virtual StatusOr<Event> CreateEvent(int gpu, bool is_timed) = 0;
  virtual StatusOr<void*> AllocateDevice(int gpu, int64_t size_bytes) = 0;
  virtual StatusOr<void*> AllocatePinnedHost(int64_t size_bytes) = 0;
  /// Gives back what one of the above made; the rest goes with this object.
  virtual void Free(void* memory) = 0;
  /// Lets `relay` copy to and from `gpu`'s memory. UNAVAILABLE if it cannot.
  virtual Status EnablePeerAccess(int relay, int gpu) = 0;
  /// Makes this process the only one that lends `gpu`'s link. UNAVAILABLE if
  /// another one does.
  virtual Status LockLender(int gpu) = 0;

  // Stream-ordered work.
  virtual Status Record(int gpu, Event event, Stream stream) = 0;
  virtual Status Wait(Stream stream, Event event) = 0;
  virtual Status Copy(Stream stream, void* dst, const void* src,
                      int64_t size_bytes, CopyKind kind) = 0;
  Status Copy(Stream stream, void* dst, const void* src, int64_t size_bytes) {
    return Copy(stream, dst, src, size_bytes, CopyKind::kAny);
  }
  /// Makes the copy engine look at other streams before it goes on with this
  /// one (docs/gpu_offload.md, "Yields").
  virtual Status Yield(int gpu, Stream stream) = 0;
  /// By the GPU's cores rather than its copy engines.
  virtual Status CopyRow(int gpu, Stream stream, const RowCopy& copy) = 0;

  // Questions. None of them waits.
  /// Whether all that was recorded in `event` has happened. An error is the
  /// device's own (a fault in an earlier operation, say).
  virtual StatusOr<bool> IsDone(Event event) = 0;
  virtual StatusOr<int64_t> ElapsedNs(Event from, Event to) = 0;
  virtual MemoryKind KindOf(const void* pointer) = 0;
  /// OK if `relay` may copy to and from `device_pointer`; UNAVAILABLE if not.
  virtual Status CheckPeerAccess(int relay, const void* device_pointer) = 0;
};

}  // namespace turbobus::transport

#endif  // TURBOBUS_TRANSPORT_STREAMS_H_

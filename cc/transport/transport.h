#ifndef TURBOBUS_TRANSPORT_TRANSPORT_H_
#define TURBOBUS_TRANSPORT_TRANSPORT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "topo/path.h"

namespace turbobus::transport {

struct BlockCopy {
  uint64_t id = 0;
  int lane = 0;
  const void* src = nullptr;
  void* dst = nullptr;
  int64_t size_bytes = 0;
};

struct BlockDone {
  uint64_t id = 0;
  /// Not OK: some bytes of `dst` may have been written, none will be any more.
  /// UNAVAILABLE means that the lane is gone, and stays so.
  Status status{};
  /// When the lane turned to the block; when its bytes had reached the relay
  /// and when that turned to passing them on (both 0 on a direct lane, or if it
  /// did not come to that); when they had reached `dst`.
  int64_t start_ns = 0;
  int64_t relayed_ns = 0;
  int64_t resumed_ns = 0;
  int64_t end_ns = 0;
};

/// Copies blocks on paths. What the engine's control thread drives.
///
/// `Issue`, `Wait` and `Drop` are called by that one thread only; `Wake` and
/// `NowNs` by any. Buffers belong to the caller and stay valid until `Wait` has
/// returned the block: only then does nobody touch them any more. A transport
/// is destroyed when no block is in flight.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Lane i runs on `paths()[i]`; fixed for the transport's life.
  virtual const std::vector<topo::Path>& paths() const = 0;

  /// Starts a copy; never blocks. An error means that nothing was started;
  /// UNAVAILABLE, that the lane is gone.
  virtual Status Issue(const BlockCopy& copy) = 0;

  /// Waits for blocks to be done, for `Wake`, or until `timeout_ns` (< 0: no
  /// limit) has passed; returns how many entries of `done` it filled.
  virtual int Wait(std::span<BlockDone> done, int64_t timeout_ns) = 0;

  /// Nobody wants this block any more: it may end early, with CANCELLED. `Wait`
  /// returns it all the same. Never blocks; an unknown id is ignored.
  virtual void Drop(uint64_t id) { static_cast<void>(id); }

  /// Makes a `Wait` under way, or else the next one, return.
  virtual void Wake() = 0;

  /// The clock of `BlockDone`.
  virtual int64_t NowNs() const = 0;
};

}  // namespace turbobus::transport

#endif  // TURBOBUS_TRANSPORT_TRANSPORT_H_

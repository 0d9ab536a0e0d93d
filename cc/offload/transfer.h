#ifndef TURBOBUS_OFFLOAD_TRANSFER_H_
#define TURBOBUS_OFFLOAD_TRANSFER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "topo/path.h"

namespace turbobus::offload {

struct Piece {
  const void* src = nullptr;
  void* dst = nullptr;
  int64_t size_bytes = 0;
};

int64_t TotalBytes(const std::vector<Piece>& pieces);

/// memcpy, past the caches where that pays.
void CopyDirectly(const std::vector<Piece>& pieces);

/// A transfer of the host library: bytes between "device" and "host" memory of
/// a CPU backend, over the process's engine if there is one, else by memcpy.
///
/// What the engine fails to move is copied directly before anyone is released,
/// so a transfer ends in an error only if it was cancelled, the engine was
/// aborted, or the engine knows no such device. Thread-safe; held by shared
/// pointers, one of them the engine's until the last byte is in place. The
/// buffers belong to the caller.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  /// Starts to move `pieces` for `device`. Returns at once if there is an
  /// engine, else when the bytes are in place. `keep_alive` lives as long as
  /// someone may touch the pieces.
  static std::shared_ptr<Transfer> Start(
      topo::Direction direction, int device, std::vector<Piece> pieces,
      std::shared_ptr<const void> keep_alive = nullptr);

  /// As above, over `engine`, or by memcpy if it is null. The process's engine
  /// may be taken out at any moment: whoever must know which one a transfer
  /// uses asks for it once and hands it in. It lives until the transfer is
  /// over.
  static std::shared_ptr<Transfer> StartOn(
      std::shared_ptr<engine::Engine> engine, topo::Direction direction,
      int device, std::vector<Piece> pieces,
      std::shared_ptr<const void> keep_alive = nullptr);

  /// Moves `pieces` by memcpy, whether there is an engine or not.
  static std::shared_ptr<Transfer> CopyNow(
      std::vector<Piece> pieces,
      std::shared_ptr<const void> keep_alive = nullptr);

  /// How it ended, or nothing while it is in flight.
  std::optional<Status> outcome() const;

  /// Calls `callback` once with the outcome: before it returns if the transfer
  /// is over, else on a thread of the engine's that has nothing else to do. At
  /// most one callback a transfer.
  void OnDone(std::function<void(Status)> callback);

  /// Blocks until the transfer is over.
  Status Wait();

 private:
  Transfer(std::vector<Piece> pieces, std::shared_ptr<const void> keep_alive)
      : pieces_(std::move(pieces)), keep_alive_(std::move(keep_alive)) {}

  void Submit(const std::shared_ptr<engine::Engine>& engine,
              topo::Direction direction, int device);
  void PieceDone(const Status& status);
  void Finish(const Status& status);

  const std::vector<Piece> pieces_;
  const std::shared_ptr<const void> keep_alive_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  size_t num_pending_ = 0;                // guarded by mutex_
  Status first_error_;                    // guarded by mutex_
  std::optional<Status> outcome_;         // guarded by mutex_
  std::function<void(Status)> callback_;  // guarded by mutex_
};

}  // namespace turbobus::offload

#endif  // TURBOBUS_OFFLOAD_TRANSFER_H_

#ifndef TURBOBUS_ENGINE_ENGINE_H_
#define TURBOBUS_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "sched/scheduler.h"
#include "transport/transport.h"

namespace turbobus::engine {

struct Request {
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  const void* src = nullptr;
  void* dst = nullptr;
  int64_t size_bytes = 0;
  int numa_node = 0;
  /// Called once, on the engine's completion thread, when the last byte is in
  /// place or the transfer has failed or was cancelled. Must not block.
  std::function<void(Status)> done;
};

/// One control thread that drives a `Scheduler` over a `Transport`.
///
/// Thread-safe. `src` and `dst` belong to the caller and must stay valid until
/// `done` has been called. The destructor drains: every `done` has been called
/// when it returns.
class Engine {
 public:
  static StatusOr<std::unique_ptr<Engine>> Create(
      sched::Config config, std::unique_ptr<transport::Transport> transport);
  virtual ~Engine() = default;

  /// Queues a transfer whose data is ready; never blocks. On an error `done` is
  /// not called.
  virtual StatusOr<sched::TransferId> Submit(Request request) = 0;

  /// Stops a transfer; its `done` gets CANCELLED unless it was already over.
  virtual Status Cancel(sched::TransferId transfer) = 0;

  /// Fails everything in flight with `reason`, and every later `Submit`.
  virtual void Abort(Status reason) = 0;
};

/// The engine of this process, or null where transfers are plain copies.
std::shared_ptr<Engine> ProcessEngine();
void SetProcessEngine(std::shared_ptr<Engine> engine);

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_ENGINE_H_

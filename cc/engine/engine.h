#ifndef TURBOBUS_ENGINE_ENGINE_H_
#define TURBOBUS_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.h"
#include "engine/live_page.h"
#include "engine/stats.h"
#include "sched/scheduler.h"
#include "transport/transport.h"

namespace turbobus::engine {

/// Host memory on the node that is nearest to the request's GPU.
inline constexpr int kNearestNumaNode = -1;

struct Request {
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  const void* src = nullptr;
  void* dst = nullptr;
  int64_t size_bytes = 0;
  int numa_node = kNearestNumaNode;
  /// Called once, when the last byte is in place or the transfer has failed or
  /// was cancelled: nobody touches `src` or `dst` any more. It runs on a thread
  /// of the engine that has nothing else to do meanwhile, so it may block
  /// without holding up other transfers (XLA continues a program inside it).
  std::function<void(Status)> done{};
};

/// How an engine's statistics and traces name things. Empty lists: by number.
struct Labels {
  std::vector<std::string> lanes{};
  /// Names of links in one direction, and which of them each hop of a lane
  /// uses.
  std::vector<LinkLabel> links{};
  std::vector<std::vector<std::vector<int>>> lane_links{};
};

struct Options {
  Labels labels{};
  /// Blocks and transfers that the trace keeps, newest first; 0: no trace.
  int64_t trace_capacity = 0;
  /// Whether other processes may look on (live_page.h).
  std::optional<LivePage::Kind> live_kind{};
};

/// One control thread that drives a `Scheduler` over a `Transport`.
///
/// Thread-safe; nothing but the destructor blocks. `src` and `dst` belong to
/// the caller and must stay valid until `done` has been called. A block that
/// fails is issued again before anyone is released; a transfer ends with an
/// error only if its direct lane failed too. The destructor drains: every
/// `done` has been called and has returned when it returns (called from within
/// a `done`, it does not wait for the other ones to return).
///
/// After a fork the child's copy has no threads: its calls fail with
/// FAILED_PRECONDITION and its destructor frees nothing.
class Engine {
 public:
  static StatusOr<std::unique_ptr<Engine>> Create(
      sched::Config config, std::unique_ptr<transport::Transport> transport,
      Options options = {});
  virtual ~Engine() = default;

  /// Queues a transfer whose data is ready; never blocks. On an error `done` is
  /// not called: INVALID_ARGUMENT naming the field, or why the engine is down.
  virtual StatusOr<sched::TransferId> Submit(Request request) = 0;

  /// Stops a transfer; its `done` gets CANCELLED unless it was already over.
  /// NOT_FOUND for an id that `Submit` never returned.
  virtual Status Cancel(sched::TransferId transfer) = 0;

  /// Fails everything in flight with `reason`, and every later `Submit`.
  virtual void Abort(Status reason) = 0;

  virtual Stats GetStats() const = 0;

  /// The newest events, oldest first; empty without `Options::trace_capacity`.
  virtual std::vector<TraceEvent> Trace() const = 0;
};

/// The engine of this process, or null where transfers are plain copies: none
/// was set, or this is the child of a fork.
std::shared_ptr<Engine> ProcessEngine();
/// Blocks until the old engine has drained, if nobody else holds it.
void SetProcessEngine(std::shared_ptr<Engine> engine);

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_ENGINE_H_

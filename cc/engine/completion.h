#ifndef TURBOBUS_ENGINE_COMPLETION_H_
#define TURBOBUS_ENGINE_COMPLETION_H_

#include <functional>
#include <memory>

#include "base/status.h"

namespace turbobus::engine {

/// Threads that call callbacks, each on a thread that does nothing else
/// meanwhile: a callback that blocks (XLA may run the rest of a program,
/// collectives included, inside it) never holds up another one. FACTS:
/// completing all promises from one thread hung XLA's all-reduce.
///
/// Thread-safe. Threads are kept for the next callbacks, up to a few.
class CompletionThreads {
 public:
  /// RESOURCE_EXHAUSTED if the first thread cannot be started.
  static StatusOr<std::unique_ptr<CompletionThreads>> Create();
  /// As `Drain`; and the threads end.
  ~CompletionThreads();
  CompletionThreads(const CompletionThreads&) = delete;
  CompletionThreads& operator=(const CompletionThreads&) = delete;

  /// Never blocks. Callbacks start in the order given. If the system has no
  /// more threads to give, they wait for one of those that exist.
  void Run(std::function<void()> callback);

  /// Waits until every callback has been called and has returned. On one of the
  /// threads themselves (within a callback) it returns at once.
  void Drain();

 private:
  struct State;

  explicit CompletionThreads(std::shared_ptr<State> state);

  // Shared with the threads, which may outlive this object by one callback.
  std::shared_ptr<State> state_;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_COMPLETION_H_

#ifndef TURBOBUS_MOE_THREADS_H_
#define TURBOBUS_MOE_THREADS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace turbobus::moe {

/// Gives every task a thread of its own, at once.
///
/// Not a pool with a limit: a task may block for as long as it likes (the rest
/// of an XLA program may run inside one, collectives included) and never keeps
/// another task from running. A thread that has finished waits a while for the
/// next task before it ends, so a steady load starts no threads.
///
/// Thread-safe. `Start` does not block. The destructor waits until all threads
/// have ended; the process-wide instance is never destroyed.
class Threads {
 public:
  using Task = std::function<void()>;

  explicit Threads(
      std::chrono::milliseconds idle_limit = std::chrono::milliseconds(10'000));
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  static Threads& Process();

  void Start(Task task);

  /// Threads alive now, busy or idle.
  int64_t num_threads() const;

 private:
  void StartThread();
  void Loop();

  const std::chrono::milliseconds idle_limit_;
  mutable std::mutex mutex_;
  std::condition_variable has_task_;
  std::condition_variable all_ended_;
  // All guarded by `mutex_`. There are never more tasks than idle threads: each
  // waiting task has a thread that is about to take it.
  std::deque<Task> tasks_;
  int64_t num_idle_ = 0;
  int64_t num_threads_ = 0;
  bool is_closing_ = false;
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_THREADS_H_

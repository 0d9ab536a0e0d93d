#include "engine/completion.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/thread.h"

namespace turbobus::engine {
namespace {

constexpr int kMaxIdleThreads = 4;

}  // namespace

namespace {

// Whose thread this is, if it is one.
thread_local const void* current_state = nullptr;

}  // namespace

// Invariant: while a callback waits, a thread is idle or about to start.
// Whoever breaks it (by adding a callback, by taking one and leaving others)
// adds a thread; so threads grow one by one, and only while callbacks really
// block.
struct CompletionThreads::State : std::enable_shared_from_this<State> {
  std::mutex mutex;
  std::condition_variable has_work;
  std::condition_variable is_drained;
  std::deque<std::function<void()>> queue;
  int num_busy = 0;
  int num_idle = 0;
  int num_starting = 0;
  bool is_stopping = false;

  bool MustAddThread() const {
    return !queue.empty() && num_idle + num_starting == 0;
  }

  /// Releases `lock`, and takes it again.
  Status AddThread(std::unique_lock<std::mutex>& lock) {
    ++num_starting;
    lock.unlock();
    StatusOr<std::thread> thread =
        StartThread("tb-done", [state = shared_from_this()] { state->Loop(); });
    if (thread.ok()) thread->detach();
    lock.lock();
    if (!thread.ok()) --num_starting;
    return thread.status();
  }

  void Loop() {
    current_state = this;
    std::unique_lock lock(mutex);
    --num_starting;
    while (true) {
      if (queue.empty() && num_idle >= kMaxIdleThreads) break;
      ++num_idle;
      has_work.wait(lock, [this] { return is_stopping || !queue.empty(); });
      --num_idle;
      if (queue.empty()) break;
      std::function<void()> callback = std::move(queue.front());
      queue.pop_front();
      ++num_busy;
      // Without another thread the rest has to wait for this one.
      if (MustAddThread()) static_cast<void>(AddThread(lock));
      lock.unlock();
      callback();
      callback = nullptr;  // What it holds goes before it counts as returned.
      lock.lock();
      --num_busy;
      if (queue.empty() && num_busy == 0) is_drained.notify_all();
    }
  }
};

StatusOr<std::unique_ptr<CompletionThreads>> CompletionThreads::Create() {
  auto state = std::make_shared<State>();
  {
    std::unique_lock lock(state->mutex);
    TB_RETURN_IF_ERROR(state->AddThread(lock));
  }
  return std::unique_ptr<CompletionThreads>(
      new CompletionThreads(std::move(state)));
}

CompletionThreads::CompletionThreads(std::shared_ptr<State> state)
    : state_(std::move(state)) {}

CompletionThreads::~CompletionThreads() {
  Drain();
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_stopping = true;
  }
  state_->has_work.notify_all();
}

void CompletionThreads::Run(std::function<void()> callback) {
  // The callback may destroy this object before the call is over.
  const std::shared_ptr<State> state = state_;
  {
    std::unique_lock lock(state->mutex);
    state->queue.push_back(std::move(callback));
    if (state->MustAddThread()) static_cast<void>(state->AddThread(lock));
  }
  state->has_work.notify_one();
}

void CompletionThreads::Drain() {
  if (current_state == state_.get()) return;
  std::unique_lock lock(state_->mutex);
  state_->is_drained.wait(
      lock, [this] { return state_->queue.empty() && state_->num_busy == 0; });
}

}  // namespace turbobus::engine

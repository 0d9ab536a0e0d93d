#include "moe/threads.h"

#include <system_error>
#include <thread>
#include <utility>

namespace turbobus::moe {

Threads::Threads(std::chrono::milliseconds idle_limit)
    : idle_limit_(idle_limit) {}

Threads::~Threads() {
  std::unique_lock lock(mutex_);
  is_closing_ = true;
  has_task_.notify_all();
  all_ended_.wait(lock, [this] { return num_threads_ == 0; });
}

Threads& Threads::Process() {
  // Leaked: its threads may outlive static destruction.
  static Threads* const threads = new Threads;
  return *threads;
}

void Threads::Start(Task task) {
  bool needs_thread = false;
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    needs_thread = static_cast<int64_t>(tasks_.size()) > num_idle_;
    if (needs_thread) {
      // Counts as idle until it has taken a task, so that the next `Start` does
      // not take this thread for its own.
      ++num_threads_;
      ++num_idle_;
    }
  }
  if (needs_thread) {
    StartThread();
  } else {
    has_task_.notify_one();
  }
}

void Threads::StartThread() {
  try {
    std::thread([this] { Loop(); }).detach();
  } catch (const std::system_error&) {
    // No thread is to be had. The task then waits for one that ends its own, or
    // runs here if there is none.
    Task task;
    {
      std::lock_guard lock(mutex_);
      --num_threads_;
      --num_idle_;
      if (num_threads_ == 0 && !tasks_.empty()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
    }
    if (task) task();
  }
}

int64_t Threads::num_threads() const {
  std::lock_guard lock(mutex_);
  return num_threads_;
}

void Threads::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    has_task_.wait_for(lock, idle_limit_,
                       [this] { return !tasks_.empty() || is_closing_; });
    if (tasks_.empty()) break;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    --num_idle_;
    lock.unlock();
    task();
    task = nullptr;  // What it holds must not live until the next task.
    lock.lock();
    ++num_idle_;
  }
  --num_idle_;
  --num_threads_;
  // Under the lock: the destructor may free the condition variable right after.
  if (num_threads_ == 0) all_ended_.notify_all();
}

}  // namespace turbobus::moe

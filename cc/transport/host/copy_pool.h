#ifndef TURBOBUS_TRANSPORT_HOST_COPY_POOL_H_
#define TURBOBUS_TRANSPORT_HOST_COPY_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"

namespace turbobus::transport::host {

/// Threads that copy memory, all of them on one large copy if there is only
/// one.
///
/// Copies start in the order they were asked for and are cut into pieces that
/// the threads share. Thread-safe; `Copy` never blocks. The destructor finishes
/// what was asked for.
class CopyPool {
 public:
  /// `num_threads` 0: one for each CPU that this process may use, at most
  /// `kMaxThreads`. RESOURCE_EXHAUSTED if not even one could be started.
  static StatusOr<std::unique_ptr<CopyPool>> Create(int num_threads = 0);
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  /// Copies and then calls `done` once, on a pool thread, under no lock. Both
  /// buffers stay valid until then.
  void Copy(void* dst, const void* src, int64_t size_bytes,
            std::function<void()> done);

  int num_threads() const { return static_cast<int>(threads_.size()); }

  /// More threads than this only fight over the memory controllers.
  static constexpr int kMaxThreads = 16;

 private:
  struct Job;

  CopyPool() = default;
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;  // with pieces that nobody has taken
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace turbobus::transport::host

#endif  // TURBOBUS_TRANSPORT_HOST_COPY_POOL_H_

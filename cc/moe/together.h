#ifndef TURBOBUS_MOE_TOGETHER_H_
#define TURBOBUS_MOE_TOGETHER_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace turbobus::moe {

class Work;

/// Shares the pieces of one work out to `num_workers` threads. Worker w starts
/// with the w-th share, so that what belongs to one rank tends to stay in one
/// core's cache, then helps the others.
class Together {
 public:
  Together(std::unique_ptr<Work> work, int num_workers);
  ~Together();

  /// Runs pieces until none is left to claim, then blocks until all of them are
  /// done. Called once by each worker.
  void RunAs(int worker);

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void Finished(int64_t num_pieces);

  const std::unique_ptr<Work> work_;
  const int num_workers_;
  const std::unique_ptr<Share[]> shares_;
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t num_left_;  // Guarded by `mutex_`.
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_TOGETHER_H_

#ifndef TURBOBUS_MOE_CUDA_MAIL_H_
#define TURBOBUS_MOE_CUDA_MAIL_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "moe/cuda/events.h"

namespace turbobus::moe::cuda {

/// Pinned host memory that kernels of every GPU reach by the same address: what
/// a rank has to say to the others in one call.
class Mail {
 public:
  Mail(uint8_t* data, int64_t size_bytes)
      : data_(data), size_bytes_(size_bytes) {}

  uint8_t* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

  /// Whoever has the memory next waits for `event`. Thread-safe.
  void AddUser(SharedEvent event);

 private:
  friend class MailPool;
  /// Whether the GPU is done with all that its users have enqueued.
  bool IsIdle();

  uint8_t* const data_;
  const int64_t size_bytes_;
  std::mutex mutex_;
  std::vector<SharedEvent> users_;  // Guarded by mutex_.
};

/// Mail that is not in use. Thread-safe; never destroyed. It has as much as
/// calls once needed at the same time.
class MailPool {
 public:
  static MailPool& Process();

  /// Memory of at least `size_bytes` for what is enqueued on `stream` from now
  /// on. Its last owner gives it back, after all who use it have said so
  /// (`AddUser`). RESOURCE_EXHAUSTED if no memory can be pinned.
  StatusOr<std::shared_ptr<Mail>> Take(int64_t size_bytes, cudaStream_t stream);

  int64_t total_bytes() const { return total_bytes_; }

 private:
  StatusOr<std::unique_ptr<Mail>> Find(int64_t size_bytes);

  std::atomic<int64_t> total_bytes_ = 0;
  std::mutex mutex_;
  // By size. Guarded by mutex_; the one given back longest ago is first.
  std::map<int64_t, std::deque<std::unique_ptr<Mail>>> free_;
  std::map<int64_t, int> num_made_;  // Guarded by mutex_.
};

/// RESOURCE_EXHAUSTED: what to do where `size_bytes` cannot be pinned.
Status CannotPin(int64_t size_bytes, cudaError_t error);

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_MAIL_H_

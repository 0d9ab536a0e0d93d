#include "transport/host/copy_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/thread.h"
#include "transport/host/memory_copy.h"

namespace turbobus::transport::host {
namespace {

// Small enough that the threads finish a block together, large enough that
// taking a piece (one lock) costs nothing beside it.
constexpr int64_t kPieceBytes = 512 << 10;

int UsableCpus() {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return CPU_COUNT(&cpus);
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

struct CopyPool::Job {
  char* dst = nullptr;
  const char* src = nullptr;
  int64_t size_bytes = 0;
  std::function<void()> done;
  bool is_streaming = false;
  int64_t num_taken_bytes = 0;  // guarded by the pool's mutex
  std::atomic<int64_t> num_left_bytes = 0;
};

StatusOr<std::unique_ptr<CopyPool>> CopyPool::Create(int num_threads) {
  if (num_threads <= 0) num_threads = std::clamp(UsableCpus(), 1, kMaxThreads);
  std::unique_ptr<CopyPool> pool(new CopyPool);
  for (int i = 0; i < num_threads; ++i) {
    StatusOr<std::thread> thread =
        StartThread("tb-copy", [pool = pool.get()] { pool->Run(); });
    if (!thread.ok()) {
      if (i > 0) break;  // Fewer threads copy as well.
      return thread.status().WithContext("copy pool");
    }
    pool->threads_.push_back(std::move(thread).value());
  }
  return pool;
}

CopyPool::~CopyPool() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void CopyPool::Copy(void* dst, const void* src, int64_t size_bytes,
                    std::function<void()> done) {
  auto job = std::make_shared<Job>();
  job->dst = static_cast<char*>(dst);
  job->src = static_cast<const char*>(src);
  job->size_bytes = size_bytes;
  job->done = std::move(done);
  job->is_streaming = size_bytes >= kStreamingBytes;
  job->num_left_bytes = size_bytes;
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  if (size_bytes > kPieceBytes) {
    changed_.notify_all();
  } else {
    changed_.notify_one();
  }
}

void CopyPool::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const std::shared_ptr<Job> job = jobs_.front();
    const int64_t offset = job->num_taken_bytes;
    const int64_t size = std::min(kPieceBytes, job->size_bytes - offset);
    job->num_taken_bytes += size;
    if (job->num_taken_bytes == job->size_bytes) jobs_.pop_front();
    lock.unlock();

    if (size > 0) {
      if (job->is_streaming) {
        if (offset == 0) AdviseHugePages(job->dst, job->size_bytes);
        StreamingCopy(job->dst + offset, job->src + offset, size);
      } else {
        std::memcpy(job->dst + offset, job->src + offset, size);
      }
    }
    // The last piece's thread must see the bytes of all others.
    if (job->num_left_bytes.fetch_sub(size, std::memory_order_acq_rel) ==
        size) {
      std::exchange(job->done, nullptr)();
    }
    lock.lock();
  }
}

}  // namespace turbobus::transport::host

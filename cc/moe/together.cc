#include "moe/together.h"

#include <utility>

#include "moe/rendezvous.h"

namespace turbobus::moe {

Together::Together(std::unique_ptr<Work> work, int num_workers)
    : work_(std::move(work)),
      num_workers_(num_workers),
      shares_(new Share[num_workers]),
      num_left_(work_->num_pieces()) {
  const int64_t num_pieces = num_left_;
  for (int w = 0; w < num_workers; ++w) {
    shares_[w].next = num_pieces * w / num_workers;
    shares_[w].end = num_pieces * (w + 1) / num_workers;
  }
  if (num_pieces == 0) work_->Finish();
}

Together::~Together() = default;

void Together::RunAs(int worker) {
  for (int i = 0; i < num_workers_; ++i) {
    Share& share = shares_[(worker + i) % num_workers_];
    int64_t num_run = 0;
    for (;;) {
      const int64_t piece = share.next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= share.end) break;
      work_->Run(piece);
      ++num_run;
    }
    if (num_run > 0) Finished(num_run);
  }
  std::unique_lock lock(mutex_);
  all_done_.wait(lock, [this] { return num_left_ == 0; });
}

void Together::Finished(int64_t num_pieces) {
  std::lock_guard lock(mutex_);
  num_left_ -= num_pieces;
  if (num_left_ > 0) return;
  work_->Finish();
  all_done_.notify_all();
}

}  // namespace turbobus::moe

#include "transport/peer_access.h"

namespace turbobus::transport {

bool PeerAccess::Has(int from, int to) {
  if (from == to) return true;
  if (from < 0 || to < 0 || from >= kMaxGpus || to >= kMaxGpus) return false;
  const Answer answer =
      answers_[from * kMaxGpus + to].load(std::memory_order_acquire);
  if (answer != Answer::kUnknown) return answer == Answer::kYes;
  return Ask(from, to).ok();
}

Status PeerAccess::Check(int from, int to) {
  return Has(from, to) ? OkStatus() : Ask(from, to);
}

Status PeerAccess::Ask(int from, int to) {
  const auto refusal = [&](const std::string& reason) {
    return Unavailable("GPU " + std::to_string(from) +
                       " cannot reach the memory of GPU " + std::to_string(to) +
                       ": " + reason);
  };
  if (from < 0 || to < 0 || from >= kMaxGpus || to >= kMaxGpus) {
    return refusal("GPUs have numbers from 0 to " +
                   std::to_string(kMaxGpus - 1));
  }
  const std::lock_guard lock(mutex_);
  if (const auto it = refused_.find({from, to}); it != refused_.end()) {
    return it->second;
  }
  std::atomic<Answer>& answer = answers_[from * kMaxGpus + to];
  if (answer.load(std::memory_order_relaxed) == Answer::kYes) return OkStatus();
  Status status;
  if (!reason_.empty()) {
    status = refusal(reason_);
  } else if (const Status enabled = enable_(from, to); !enabled.ok()) {
    status = refusal(enabled.message());
  }
  if (!status.ok()) refused_[{from, to}] = status;
  answer.store(status.ok() ? Answer::kYes : Answer::kNo,
               std::memory_order_release);
  return status;
}

}  // namespace turbobus::transport

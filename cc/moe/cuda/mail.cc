#include "moe/cuda/mail.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace turbobus::moe::cuda {
namespace {

constexpr int64_t kLeastBytes = 64 << 10;
/// So many of a size are made before one is taken that is still in use: calls
/// on different streams would wait for each other.
constexpr int kEnough = 8;

}  // namespace

Status CannotPin(int64_t size_bytes, cudaError_t error) {
  return ResourceExhausted(
      "no " + std::to_string(size_bytes) +
      " bytes of pinned host memory for an exchange of GPUs that do not reach "
      "each other (" +
      cudaGetErrorName(error) +
      "); raise the limit of locked memory (ulimit -l, or the container's), or "
      "exchange in chunks (expert_parallel, num_chunks)");
}

void Mail::AddUser(SharedEvent event) {
  const std::lock_guard lock(mutex_);
  users_.push_back(std::move(event));
}

bool Mail::IsIdle() {
  const std::lock_guard lock(mutex_);
  const bool is_idle = std::ranges::all_of(users_, [](const auto& user) {
    return cudaEventQuery(user.get()) == cudaSuccess;
  });
  (void)cudaGetLastError();  // One that is not ready is no error.
  return is_idle;
}

MailPool& MailPool::Process() {
  static auto* const pool = new MailPool;
  return *pool;
}

StatusOr<std::unique_ptr<Mail>> MailPool::Find(int64_t size_bytes) {
  {
    const std::lock_guard lock(mutex_);
    std::deque<std::unique_ptr<Mail>>& unused = free_[size_bytes];
    auto it = std::ranges::find_if(
        unused, [](const auto& mail) { return mail->IsIdle(); });
    if (it == unused.end() && num_made_[size_bytes] >= kEnough) {
      it = unused.begin();
    }
    if (it != unused.end()) {
      std::unique_ptr<Mail> mail = std::move(*it);
      unused.erase(it);
      return mail;
    }
    ++num_made_[size_bytes];
  }
  void* data = nullptr;
  if (const cudaError_t error =
          cudaHostAlloc(&data, static_cast<size_t>(size_bytes),
                        cudaHostAllocPortable | cudaHostAllocMapped);
      error != cudaSuccess) {
    (void)cudaGetLastError();
    return CannotPin(size_bytes, error);
  }
  total_bytes_ += size_bytes;
  return std::make_unique<Mail>(static_cast<uint8_t*>(data), size_bytes);
}

StatusOr<std::shared_ptr<Mail>> MailPool::Take(int64_t size_bytes,
                                               cudaStream_t stream) {
  const auto size = static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::max(size_bytes, kLeastBytes))));
  TB_ASSIGN_OR_RETURN(std::unique_ptr<Mail> found, Find(size));
  std::shared_ptr<Mail> mail(found.release(), [this](Mail* returned) {
    const std::lock_guard lock(mutex_);
    free_[returned->size_bytes()].emplace_back(returned);
  });
  const std::lock_guard lock(mail->mutex_);
  for (const SharedEvent& user : mail->users_) {
    TB_RETURN_IF_ERROR(FromCuda(cudaStreamWaitEvent(stream, user.get(), 0),
                                "cudaStreamWaitEvent"));
  }
  mail->users_.clear();
  return mail;
}

}  // namespace turbobus::moe::cuda

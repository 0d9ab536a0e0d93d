#include "moe/blocking_meeting.h"

#include <algorithm>

namespace turbobus::moe {
namespace {

/// How long a rank spins before it sleeps. Waking a thread costs 20–50 µs, more
/// than all else that a meeting does.
constexpr std::chrono::microseconds kSpin{200};

constexpr size_t kMaxFailed = 1024;
/// Runs whose positions are remembered. A device has few runs under way.
constexpr size_t kMaxRuns = 4096;

std::string MissingRanks(const std::vector<bool>& is_present) {
  std::string ranks;
  for (size_t rank = 0; rank < is_present.size(); ++rank) {
    if (is_present[rank]) continue;
    if (!ranks.empty()) ranks += ", ";
    ranks += std::to_string(rank);
  }
  return ranks;
}

}  // namespace

BlockingMeeting& BlockingMeeting::Process() {
  static auto* const meeting = new BlockingMeeting(std::chrono::seconds(60));
  return *meeting;
}

void BlockingMeeting::set_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

std::chrono::milliseconds BlockingMeeting::timeout() const {
  const std::lock_guard lock(mutex_);
  return timeout_;
}

int64_t BlockingMeeting::NextPosition(int64_t run_id, int device) {
  const std::lock_guard lock(mutex_);
  if (runs_.size() >= kMaxRuns) {
    // Forget the half that was used longest ago.
    std::vector<uint64_t> uses;
    uses.reserve(runs_.size());
    for (const auto& [key, run] : runs_) uses.push_back(run.last_use);
    const auto middle = uses.begin() + static_cast<int64_t>(uses.size() / 2);
    std::nth_element(uses.begin(), middle, uses.end());
    std::erase_if(runs_, [limit = *middle](const auto& entry) {
      return entry.second.last_use < limit;
    });
  }
  Run& run = runs_[{run_id, device}];
  run.last_use = ++num_uses_;
  return run.next_position++;
}

void BlockingMeeting::FailLocked(const CallKey& key, Phase& phase,
                                 Status status) {
  phase.status = status;
  phase.is_over.store(true, std::memory_order_release);
  std::erase_if(open_,
                [&](const auto& entry) { return entry.first.first == key; });
  if (failed_.emplace(key, std::move(status)).second) {
    failed_order_.push_back(key);
  }
  if (failed_order_.size() > kMaxFailed) {
    failed_.erase(failed_order_.front());
    failed_order_.pop_front();
  }
  changed_.notify_all();
}

StatusOr<BlockingMeeting::Records> BlockingMeeting::Meet(const CallKey& key,
                                                         int phase,
                                                         const Rank& who,
                                                         Record record) {
  std::unique_lock lock(mutex_);
  if (const auto failed = failed_.find(key); failed != failed_.end()) {
    return failed->second;
  }
  std::shared_ptr<Phase>& slot = open_[{key, phase}];
  if (slot == nullptr) {
    slot = std::make_shared<Phase>();
    slot->op = who.op;
    slot->is_present.resize(who.num_ranks);
    slot->records.resize(who.num_ranks);
  }
  const std::shared_ptr<Phase> meeting = slot;
  if (meeting->is_present.size() != static_cast<size_t>(who.num_ranks) ||
      meeting->op != who.op || meeting->is_present[who.rank]) {
    FailLocked(
        key, *meeting,
        Internal(std::string(who.op) + ": rank " + std::to_string(who.rank) +
                 " of " + std::to_string(who.num_ranks) + " came to " +
                 meeting->op + " of " +
                 std::to_string(meeting->is_present.size()) +
                 " ranks; the devices issue different calls: an exchange "
                 "inside lax.cond must be taken by all ranks or none"));
    return meeting->status;
  }
  meeting->is_present[who.rank] = true;
  meeting->records[who.rank] = std::move(record);
  if (++meeting->num_present == who.num_ranks) {
    meeting->is_over.store(true, std::memory_order_release);
    open_.erase({key, phase});
    changed_.notify_all();
  } else {
    const auto limit = timeout_;
    const auto is_over = [&] {
      return meeting->is_over.load(std::memory_order_acquire);
    };
    lock.unlock();
    const auto spin_end = std::chrono::steady_clock::now() + kSpin;
    while (!is_over() && std::chrono::steady_clock::now() < spin_end) {
    }
    if (is_over()) {
      if (!meeting->status.ok()) return meeting->status;
      return Records(meeting, &meeting->records);
    }
    lock.lock();
    if (!changed_.wait_for(lock, limit, is_over)) {
      FailLocked(
          key, *meeting,
          DeadlineExceeded(std::string(who.op) + ": waited " +
                           std::to_string(limit.count()) + " ms for rank(s) " +
                           MissingRanks(meeting->is_present) + " of " +
                           std::to_string(who.num_ranks) + " in meeting " +
                           std::to_string(phase) +
                           ": they failed, run another program, or are late; "
                           "JAX_TURBOBUS_EXCHANGE_TIMEOUT_S sets the limit"));
    }
  }
  if (!meeting->status.ok()) return meeting->status;
  return Records(meeting, &meeting->records);
}

void BlockingMeeting::Fail(const CallKey& key, const Rank& who,
                           const Status& reason) {
  const std::lock_guard lock(mutex_);
  if (failed_.contains(key)) return;
  const Status status = reason.WithContext(
      std::string(who.op) + ": rank " + std::to_string(who.rank) + " failed");
  bool is_told = false;
  const std::vector<std::shared_ptr<Phase>> phases = [&] {
    std::vector<std::shared_ptr<Phase>> found;
    for (const auto& [id, phase] : open_) {
      if (id.first == key) found.push_back(phase);
    }
    return found;
  }();
  for (const auto& phase : phases) {
    FailLocked(key, *phase, status);
    is_told = true;
  }
  if (!is_told) {
    Phase nobody;
    FailLocked(key, nobody, status);
  }
}

Status BlockingMeeting::Failure(const CallKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto failed = failed_.find(key);
  return failed == failed_.end() ? OkStatus() : failed->second;
}

int64_t BlockingMeeting::num_open() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(open_.size());
}

}  // namespace turbobus::moe

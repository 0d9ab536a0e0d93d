#include "moe/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <random>
#include <utility>

#include "moe/together.h"

namespace turbobus::moe {
namespace {

// How many failed calls are remembered for ranks that come late.
constexpr size_t kMaxFailed = 4096;

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string Seconds(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", 1e-3 * time.count());
  return text;
}

Status Overdue(const std::string& op,
               const std::vector<std::unique_ptr<Member>>& members,
               int64_t size_bytes, std::chrono::milliseconds timeout) {
  std::vector<int> missing;
  std::vector<int> present;
  for (size_t r = 0; r < members.size(); ++r) {
    (members[r] == nullptr ? missing : present).push_back(static_cast<int>(r));
  }
  return DeadlineExceeded(
      op + ": " + RankList(missing) + " of " + std::to_string(members.size()) +
      " did not come within " + Seconds(timeout) + "; " + RankList(present) +
      " waited for " + std::to_string(size_bytes) +
      " bytes from each that is missing. It failed, stopped, or computes for "
      "longer: raise JAX_TURBOBUS_EXCHANGE_TIMEOUT_S if it is only slow");
}

}  // namespace

Rendezvous::Rendezvous(std::chrono::milliseconds timeout, Threads& threads)
    : threads_(threads), timeout_(timeout) {}

Rendezvous::~Rendezvous() {
  std::vector<std::unique_ptr<Open>> waiting;
  {
    std::unique_lock lock(mutex_);
    is_closing_ = true;
    wake_watcher_.notify_all();
    watcher_ended_.wait(lock, [this] { return !is_watched_; });
    for (auto& [key, queue] : open_) {
      for (auto& open : queue) waiting.push_back(std::move(open));
    }
  }
  for (auto& open : waiting) {
    Fail(std::move(open->members), Cancelled(open->op + ": shutting down"));
  }
}

Rendezvous& Rendezvous::Process() {
  // Leaked: handlers may run until the process ends.
  static Rendezvous* const rendezvous =
      new Rendezvous(std::chrono::seconds(60));
  return *rendezvous;
}

uint64_t Rendezvous::NewKey() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

uint64_t Rendezvous::ProcessTag() {
  static const uint64_t tag = [] {
    std::random_device random;
    return (static_cast<uint64_t>(random()) << 32) | random();
  }();
  return tag;
}

void Rendezvous::set_timeout(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

std::chrono::milliseconds Rendezvous::timeout() const {
  std::lock_guard lock(mutex_);
  return timeout_;
}

int64_t Rendezvous::num_open() const {
  std::lock_guard lock(mutex_);
  int64_t num = 0;
  for (const auto& [key, queue] : open_) num += queue.size();
  return num;
}

void Rendezvous::Arrive(const Meeting& meeting, std::unique_ptr<Member> member,
                        MakeWork make_work) {
  std::unique_ptr<Open> complete;
  Status status;
  {
    std::lock_guard lock(mutex_);
    status = Join(meeting, member, complete);
  }
  if (!status.ok()) {
    std::vector<std::unique_ptr<Member>> alone;
    alone.push_back(std::move(member));
    Fail(std::move(alone), status);
  } else if (complete != nullptr) {
    Begin(*complete, make_work);
  }
}

Status Rendezvous::Join(const Meeting& meeting, std::unique_ptr<Member>& member,
                        std::unique_ptr<Open>& complete) {
  if (meeting.num_ranks < 1 || meeting.rank < 0 ||
      meeting.rank >= meeting.num_ranks) {
    return Internal(meeting.op + ": rank " + std::to_string(meeting.rank) +
                    " of " + std::to_string(meeting.num_ranks));
  }
  if (auto it = failed_.find(meeting.key); it != failed_.end()) {
    Failed& failed = it->second;
    const size_t rank = meeting.rank;
    if (rank < failed.has_come.size() && !failed.has_come[rank]) {
      const Status status = failed.status;
      failed.has_come[rank] = true;
      if (--failed.num_missing == 0) {
        std::erase(failed_order_, meeting.key);
        failed_.erase(it);
      }
      return status;
    }
  }
  Queue& queue = open_[meeting.key];
  auto it = std::find_if(queue.begin(), queue.end(), [&](const auto& open) {
    return static_cast<int>(open->members.size()) != meeting.num_ranks ||
           open->members[meeting.rank] == nullptr;
  });
  if (it == queue.end()) {
    queue.push_back(NewMeeting(meeting));
    it = std::prev(queue.end());
  }
  Open& open = **it;
  if (static_cast<int>(open.members.size()) != meeting.num_ranks ||
      open.op != meeting.op) {
    return Internal("one call with two meanings: rank " +
                    std::to_string(meeting.rank) + " came to " + meeting.op +
                    " of " + std::to_string(meeting.num_ranks) +
                    " ranks, others to " + open.op + " of " +
                    std::to_string(open.members.size()));
  }
  open.members[meeting.rank] = std::move(member);
  if (++open.num_present == meeting.num_ranks) {
    complete = std::move(*it);
    queue.erase(it);
    if (queue.empty()) open_.erase(meeting.key);
  }
  return OkStatus();
}

std::unique_ptr<Rendezvous::Open> Rendezvous::NewMeeting(
    const Meeting& meeting) {
  auto open = std::make_unique<Open>();
  open->op = meeting.op;
  open->size_bytes = meeting.size_bytes;
  open->timeout = timeout_;
  open->deadline = Clock::now() + timeout_;
  open->members.resize(meeting.num_ranks);
  if (!is_watched_) {
    is_watched_ = true;
    threads_.Start([this] { Watch(); });
  } else if (open->deadline < watched_until_) {
    wake_watcher_.notify_all();
  }
  return open;
}

void Rendezvous::Begin(Open& open, MakeWork make_work) {
  auto work = make_work(open.members);
  if (!work.ok()) {
    Fail(std::move(open.members), work.status().WithContext(open.op));
    return;
  }
  struct Call {
    std::vector<std::unique_ptr<Member>> members;  // Outlive the work.
    std::unique_ptr<Together> together;
  };
  const int num_ranks = static_cast<int>(open.members.size());
  auto call = std::make_shared<Call>();
  call->together = std::make_unique<Together>(std::move(*work), num_ranks);
  call->members = std::move(open.members);
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads_.Start([call, rank] {
      call->together->RunAs(rank);
      call->members[rank]->Done(OkStatus());
    });
  }
}

void Rendezvous::Fail(std::vector<std::unique_ptr<Member>> members,
                      const Status& status) {
  for (auto& member : members) {
    if (member == nullptr) continue;
    threads_.Start([member = std::shared_ptr<Member>(std::move(member)),
                    status] { member->Done(status); });
  }
}

void Rendezvous::Expire(Clock::time_point now) {
  std::vector<std::pair<std::unique_ptr<Open>, Status>> overdue;
  {
    std::lock_guard lock(mutex_);
    for (auto it = open_.begin(); it != open_.end();) {
      Queue& queue = it->second;
      for (auto& open : queue) {
        if (open->deadline > now) continue;
        const Status status =
            Overdue(open->op, open->members, open->size_bytes, open->timeout);
        Remember(it->first, *open, status);
        overdue.emplace_back(std::move(open), status);
      }
      std::erase(queue, nullptr);
      it = queue.empty() ? open_.erase(it) : std::next(it);
    }
  }
  for (auto& [open, status] : overdue) Fail(std::move(open->members), status);
}

void Rendezvous::Remember(uint64_t key, const Open& open,
                          const Status& status) {
  Failed failed{.status = status, .has_come = {}, .num_missing = 0};
  for (const auto& member : open.members) {
    failed.has_come.push_back(member != nullptr);
    failed.num_missing += member == nullptr ? 1 : 0;
  }
  if (!failed_.emplace(key, std::move(failed)).second) return;
  failed_order_.push_back(key);
  if (failed_order_.size() > kMaxFailed) {
    failed_.erase(failed_order_.front());
    failed_order_.pop_front();
  }
}

void Rendezvous::Watch() {
  std::unique_lock lock(mutex_);
  while (!is_closing_) {
    watched_until_ = Clock::time_point::max();
    for (const auto& [key, queue] : open_) {
      for (const auto& open : queue) {
        watched_until_ = std::min(watched_until_, open->deadline);
      }
    }
    if (watched_until_ == Clock::time_point::max()) {
      wake_watcher_.wait(lock);
    } else if (wake_watcher_.wait_until(lock, watched_until_) ==
               std::cv_status::timeout) {
      lock.unlock();
      Expire(Clock::now());
      lock.lock();
    }
  }
  is_watched_ = false;
  watcher_ended_.notify_all();
}

}  // namespace turbobus::moe

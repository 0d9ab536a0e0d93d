#include "moe/roll_call.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "moe/rendezvous.h"

namespace turbobus::moe {
namespace {

// How often it is looked whether somebody has waited too long.
constexpr std::chrono::milliseconds kInterval{100};
// After so many of them without a call the watcher sleeps until one wakes it.
constexpr int kQuietIntervals = 20;
constexpr std::chrono::milliseconds kMostPatience{15'000};
// Rolls that are kept of runs that ended early.
constexpr size_t kMostOpen = 4096;

std::string List(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string Missing(const std::string& op,
                    const std::vector<int64_t>& num_times,
                    std::chrono::milliseconds waited) {
  const int64_t most = *std::max_element(num_times.begin(), num_times.end());
  std::vector<int> missing;
  std::vector<int> waiting;
  for (size_t r = 0; r < num_times.size(); ++r) {
    (num_times[r] < most ? missing : waiting).push_back(static_cast<int>(r));
  }
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", 1e-3 * waited.count());
  return "jax_turbobus: " + op + ": " + List(missing) + " of " +
         std::to_string(num_times.size()) + " did not come within " + seconds +
         " s; " + List(waiting) +
         " wait in XLA's all-gather, which ends the process after about a "
         "minute. Who is missing computes for longer, has failed, or skips the "
         "call: all ranks must take the same branch of a lax.cond";
}

}  // namespace

RollCall::RollCall(std::function<std::chrono::milliseconds()> patience,
                   Report report)
    : patience_(std::move(patience)), report_(std::move(report)) {}

RollCall::~RollCall() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    changed_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
}

RollCall& RollCall::Process() {
  static auto* const roll_call = new RollCall(
      [] { return std::min(Rendezvous::Process().timeout(), kMostPatience); },
      [](const std::string& text) {
        std::fprintf(stderr, "%s\n", text.c_str());
        std::fflush(stderr);
      });
  return *roll_call;
}

void RollCall::Come(const Place& place, int rank, int num_ranks) {
  if (rank < 0 || rank >= num_ranks) return;
  const std::lock_guard lock(mutex_);
  Roll& roll = open_[place];
  if (roll.num_times.empty()) {
    roll.num_times.resize(num_ranks);
    roll.since = Clock::now();
  }
  if (static_cast<int>(roll.num_times.size()) != num_ranks) return;
  ++roll.num_times[rank];
  const auto is_like_first = [&](int64_t times) {
    return times == roll.num_times[0];
  };
  if (std::ranges::all_of(roll.num_times, is_like_first)) {
    open_.erase(place);
    return;
  }
  if (open_.size() > kMostOpen) open_.clear();
  if (!watcher_.joinable()) watcher_ = std::thread([this] { Watch(); });
  if (is_idle_) changed_.notify_all();
}

void RollCall::Check(Clock::time_point now) {
  const std::chrono::milliseconds patience = patience_();
  std::vector<std::string> texts;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [place, roll] : open_) {
      if (roll.is_reported || now - roll.since < patience) continue;
      roll.is_reported = true;
      texts.push_back(Missing(place.op, roll.num_times, patience));
    }
  }
  for (const std::string& text : texts) report_(text);
}

int64_t RollCall::num_open() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(open_.size());
}

void RollCall::Watch() {
  std::unique_lock lock(mutex_);
  int num_quiet = 0;
  while (!is_closing_) {
    num_quiet = open_.empty() ? num_quiet + 1 : 0;
    is_idle_ = num_quiet > kQuietIntervals;
    if (is_idle_) {
      changed_.wait(lock);
      num_quiet = 0;
      is_idle_ = false;
    } else {
      changed_.wait_for(lock, kInterval);
    }
    lock.unlock();
    Check(Clock::now());
    lock.lock();
  }
}

}  // namespace turbobus::moe

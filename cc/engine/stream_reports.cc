// What others may know of the engine: the part of StreamEngine that reports.

#include <utility>

#include "engine/stream_engine.h"

namespace turbobus::engine {

StreamStats StreamEngine::stats() {
  const std::lock_guard lock(mutex_);
  Poll();
  StreamStats stats = stats_;
  stats.now_ns = streams_->NowNs();
  stats.num_in_flight = static_cast<int64_t>(flights_.size());
  for (const auto& number : num_started_) stats.num_started += number;
  stats.num_guessed_stacks = static_cast<int64_t>(guesses_.size());
  for (auto& [key, guesses] : guesses_) {
    ReadSeen(guesses);
    stats.num_guesses_right += guesses.predictor.num_right();
    stats.num_guesses_wrong += guesses.predictor.num_wrong();
  }
  for (const FlightPtr& flight : flights_) {
    if (!flight->is_issued) continue;
    for (const LaneUse& use : flight->uses) {
      stats.num_blocks_in_flight += use.num_blocks;
      stats.paths[use.path].bytes_in_flight += use.bytes;
    }
  }
  for (size_t i = 0; i < health_.size(); ++i) {
    stats.paths[i].is_backed_off =
        health_[i].is_backed_off() || loans_[i].is_paused(stats.now_ns);
    stats.paths[i].num_late = health_[i].num_late();
    stats.paths[i].share = health_[i].share();
    stats.paths[i].has_rival = rivals_[i].is_likely();
  }
  stats.handler_ns.assign(handler_ns_.begin(), handler_ns_.end());
  return stats;
}

std::vector<StreamSpan> StreamEngine::TakeSpans() {
  const std::lock_guard lock(mutex_);
  Poll();
  std::vector<StreamSpan> spans(spans_.begin(), spans_.end());
  spans_.clear();
  return spans;
}

std::vector<std::string> StreamEngine::TakeMessages() {
  const std::lock_guard lock(mutex_);
  return std::exchange(messages_, {});
}

std::vector<TransferRecord> StreamEngine::recent_transfers() {
  const std::lock_guard lock(mutex_);
  Poll();
  return {recent_.begin(), recent_.end()};
}

void StreamEngine::SetLog(std::function<void(const std::string&)> log) {
  const std::lock_guard lock(mutex_);
  log_ = std::move(log);
}

}  // namespace turbobus::engine

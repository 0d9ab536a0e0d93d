// What has happened on the device since the last call: the part of StreamEngine
// that looks back.

#include <algorithm>
#include <set>
#include <utility>

#include "engine/stream_engine.h"

namespace turbobus::engine {
namespace {

using transport::Event;
using transport::Stream;

/// Being late by less than this says nothing about a link.
constexpr int64_t kNoiseNs = 60'000;
constexpr size_t kMaxSpans = 1 << 20;
/// A program that fails between start and done leaves its transfer behind.
constexpr size_t kMaxAbandoned = 4096;

}  // namespace

StatusOr<Event> StreamEngine::TakeEvent(int gpu, bool is_timed) {
  std::vector<Event>& idle = events_[{gpu, is_timed}];
  if (!idle.empty()) {
    const Event event = idle.back();
    idle.pop_back();
    return event;
  }
  ++stats_.num_events;
  return streams_->CreateEvent(gpu, is_timed);
}

void StreamEngine::Poll() {
  // What was joined to a stream later ends later: one look a stream is enough.
  std::set<Stream> waiting;
  for (const FlightPtr& flight : flights_) {
    if (!flight->is_issued || flight->num_holders > 0 ||
        waiting.contains(flight->stream)) {
      continue;
    }
    bool is_over = true;
    for (const LaneUse& use : flight->uses) {
      const auto done = streams_->IsDone(use.end);
      if (!done.ok() && device_error_.ok()) {
        device_error_ = done.status();
        messages_.push_back(device_error_.message());
      }
      if (done.ok() && !*done) {
        is_over = false;
        break;
      }
    }
    if (is_over) {
      Finish(flight);
    } else if (flight->is_joined) {
      waiting.insert(flight->stream);
    }
  }
  std::erase_if(flights_,
                [](const FlightPtr& flight) { return flight->is_finished; });
  if (in_flight_.size() > kMaxAbandoned) {
    std::erase_if(in_flight_,
                  [](const auto& entry) { return entry.second->is_finished; });
  }
}

void StreamEngine::Finish(const FlightPtr& flight) {
  flight->is_finished = true;
  if (settings_.is_traced) AddSpans(*flight);
  for (LaneUse& use : flight->uses) {
    PathStats& stats = stats_.paths[use.path];
    ++stats.num_transfers;
    stats.num_blocks += use.num_blocks;
    stats.size_bytes += use.bytes;
    if (const auto elapsed = streams_->ElapsedNs(use.start, use.end);
        elapsed.ok()) {
      stats.busy_ns += *elapsed;
      Judge(use, *elapsed);
    }
    events_[{use.link_gpu, true}].push_back(use.start);
    events_[{use.link_gpu, true}].push_back(use.end);
    for (const BlockMark& mark : use.marks) {
      events_[{use.link_gpu, true}].push_back(mark.end);
    }
  }
  events_[{flight->gpu, false}].push_back(flight->begin);
}

void StreamEngine::Judge(const LaneUse& use, int64_t elapsed_ns) {
  if (!paths_[use.path].is_relay() || !use.is_clean || use.bytes == 0) return;
  const auto allowed_ns = static_cast<int64_t>(
      settings_.late_factor * static_cast<double>(use.expected_ns));
  Health& health = health_[use.path];
  health.is_backed_off = elapsed_ns > allowed_ns + kNoiseNs;
  if (health.is_backed_off) ++health.num_late;
}

void StreamEngine::AddSpans(const Flight& flight) {
  for (const LaneUse& use : flight.uses) {
    const Epoch& epoch = epochs_[use.link_gpu];
    const auto at = [&](Event event) -> int64_t {
      const auto since = streams_->ElapsedNs(epoch.event, event);
      return since.ok() ? epoch.time_ns + *since : epoch.time_ns;
    };
    const auto add = [&](int64_t bytes, int64_t start_ns, int64_t end_ns) {
      if (spans_.size() >= kMaxSpans) spans_.pop_front();
      spans_.push_back({use.path, flight.id, std::string(flight.call), bytes,
                        start_ns, end_ns});
    };
    int64_t start_ns = at(use.start);
    if (use.marks.empty()) add(use.bytes, start_ns, at(use.end));
    for (const BlockMark& mark : use.marks) {
      const int64_t end_ns = at(mark.end);
      add(mark.size_bytes, start_ns, end_ns);
      start_ns = end_ns;
    }
  }
}

void StreamEngine::StartTrace() {
  for (auto& [gpu, epoch] : epochs_) {
    // The stream is empty: the event happens now, give or take microseconds.
    epoch.time_ns = streams_->NowNs();
    (void)streams_->Record(gpu, epoch.event, epoch.stream);
  }
}

void StreamEngine::DropPath(int path, const std::string& reason) {
  std::string& dropped = stats_.paths[path].dropped;
  if (!dropped.empty()) return;
  dropped = reason;
  messages_.push_back("GPU " + std::to_string(paths_[path].relay) +
                      " no longer lends its link to GPU " +
                      std::to_string(paths_[path].gpu) + ": " + reason);
}

}  // namespace turbobus::engine

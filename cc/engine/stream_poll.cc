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

/// Less than this says nothing about a link.
constexpr int64_t kMinJudgedBytes = 1 << 20;
constexpr size_t kMaxSpans = 1 << 20;
constexpr size_t kMaxRecent = 256;
/// Within it, times from an event are exact to two microseconds.
constexpr int64_t kEpochNs = 20'000'000'000;

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
  RenewEpochs();
  if (live_ != nullptr) live_->SetLooked(streams_->NowNs());
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
      if (!done.ok()) flight->status = done.status();
      if (!done.ok() && device_error_.ok()) {
        device_error_ = done.status();
        Say(device_error_.message());
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
}

void StreamEngine::Finish(const FlightPtr& flight) {
  flight->is_finished = true;
  if (settings_.is_traced) AddSpans(*flight);
  Judge(*flight);
  TransferRecord record = RecordOf(*flight);
  Book(*flight, record);
  for (size_t i = 0; i < paths_.size(); ++i) {
    const topo::Path& path = paths_[i];
    if (path.gpu == flight->gpu && path.direction == flight->direction &&
        path.is_relay()) {
      rivals_[i].Record(OverlapWith(path.relay, record));
    }
  }
  for (LaneUse& use : flight->uses) {
    PathStats& stats = stats_.paths[use.path];
    stats.num_transfers += use.bytes > 0;
    stats.num_blocks += use.num_blocks;
    stats.size_bytes += use.bytes;
    if (const auto elapsed = streams_->ElapsedNs(use.start, use.end);
        elapsed.ok() && use.bytes > 0) {
      stats.busy_ns += *elapsed;
    }
    events_[{use.link_gpu, true}].push_back(use.start);
    events_[{use.link_gpu, true}].push_back(use.end);
    for (const BlockMark& mark : use.marks) {
      events_[{use.link_gpu, true}].push_back(mark.end);
      if (mark.hop != nullptr)
        events_[{use.link_gpu, true}].push_back(mark.hop);
    }
  }
  events_[{flight->gpu, false}].push_back(flight->begin);
  CountOver(*flight);
  if (flight->status.ok()) {
    ++stats_.num_completed;
    stats_.completed_bytes += flight->size_bytes;
  } else {
    ++stats_.num_failed;
  }
  stats_.num_reissued_blocks += flight->num_reissued_blocks;
  if (recent_.size() >= kMaxRecent) recent_.pop_front();
  recent_.push_back(std::move(record));
}

double StreamEngine::DirectSlowdown(const Flight& flight) {
  double slowdown = 1;
  for (const LaneUse& use : flight.uses) {
    if (paths_[use.path].is_relay() || use.bytes < kMinJudgedBytes) continue;
    const auto elapsed = streams_->ElapsedNs(use.start, use.end);
    if (elapsed.ok()) {
      slowdown = std::max(slowdown, static_cast<double>(*elapsed) /
                                        static_cast<double>(use.expected_ns));
    }
  }
  return slowdown;
}

void StreamEngine::Book(const Flight& flight, const TransferRecord& record) {
  // Rows of which the GPU's cores copy a part are not timed as a whole.
  if (flight.uses.size() < 2 || paths_[flight.uses[0].path].is_relay()) return;
  const LaneUse* last = nullptr;
  for (const LaneUse& use : flight.uses) {
    if (!use.is_clean) return;
    if (last == nullptr ||
        TimeOf(use.link_gpu, use.end) > TimeOf(last->link_gpu, last->end)) {
      last = &use;
    }
  }
  const double direct_ns = static_cast<double>(flight.size_bytes) /
                           paths_[flight.uses[0].path].bandwidth_bytes_per_s *
                           1e9 * DirectSlowdown(flight);
  const int64_t saved_ns =
      static_cast<int64_t>(direct_ns) - (record.ended_ns - record.started_ns);
  for (const LaneUse& use : flight.uses) {
    // All have a part in what was gained, who came last in what was lost.
    if (paths_[use.path].is_relay() && (saved_ns > 0 || &use == last)) {
      loans_[use.path].Record(saved_ns, streams_->NowNs());
    }
  }
}

void StreamEngine::Judge(const Flight& flight) {
  // Where the direct lane was slow as well, it is not the relay's fault.
  const double slowdown = DirectSlowdown(flight);
  for (const LaneUse& use : flight.uses) {
    if (!paths_[use.path].is_relay() || !use.is_clean ||
        use.bytes < std::min(kMinJudgedBytes, settings_.block_bytes)) {
      continue;
    }
    const auto elapsed = streams_->ElapsedNs(use.start, use.end);
    if (!elapsed.ok()) continue;
    // What issuing and events may take when the machine is busy.
    const int64_t noise_ns =
        settings_.relay_latency_ns * (8 + use.num_blocks) / 4;
    health_[use.path].Record(
        *elapsed - noise_ns,
        static_cast<int64_t>(slowdown * static_cast<double>(use.expected_ns)),
        settings_.late_factor);
  }
}

double StreamEngine::OverlapWith(int gpu, const TransferRecord& record) {
  int64_t overlap_ns = 0;
  const auto add = [&](int64_t start_ns, int64_t end_ns) {
    overlap_ns +=
        std::max<int64_t>(0, std::min(end_ns, record.ended_ns) -
                                 std::max(start_ns, record.started_ns));
  };
  for (const TransferRecord& other : recent_) {
    if (other.gpu == gpu && other.direction == record.direction) {
      add(other.started_ns, other.ended_ns);
    }
  }
  for (const FlightPtr& other : flights_) {
    if (other->gpu != gpu || other->direction != record.direction ||
        !other->is_issued || other->is_finished || other->uses.empty()) {
      continue;
    }
    const LaneUse& use = other->uses[0];
    const auto has_started = streams_->IsDone(use.start);
    if (has_started.ok() && *has_started) {
      add(TimeOf(use.link_gpu, use.start), record.ended_ns);
    }
  }
  return static_cast<double>(overlap_ns) /
         static_cast<double>(
             std::max<int64_t>(record.ended_ns - record.started_ns, 1));
}

int64_t StreamEngine::TimeOf(int gpu, Event event) {
  const Epoch& epoch = epochs_[gpu];
  const auto since = streams_->ElapsedNs(epoch.event, event);
  return since.ok() ? epoch.time_ns + *since : epoch.time_ns;
}

void StreamEngine::AddSpans(const Flight& flight) {
  const auto add = [&](const LaneUse& use, StreamSpan span) {
    if (spans_.size() >= kMaxSpans) spans_.pop_front();
    span.path = use.path;
    span.transfer = flight.id;
    span.call = flight.call;
    span.issued_ns = flight.submitted_ns;
    span.code = flight.status.code();
    spans_.push_back(std::move(span));
  };
  // What cores copy on XLA's stream is the first part of a row, and not timed.
  int64_t offset = flight.size_bytes;
  for (const LaneUse& use : flight.uses) offset -= use.bytes;
  for (const LaneUse& use : flight.uses) {
    if (use.marks.empty() && use.bytes > 0) {
      add(use, {.offset_bytes = offset,
                .size_bytes = use.bytes,
                .start_ns = TimeOf(use.link_gpu, use.start),
                .end_ns = TimeOf(use.link_gpu, use.end)});
    }
    offset += use.bytes;
    AddBlockSpans(use, add);
  }
}

void StreamEngine::AddBlockSpans(
    const LaneUse& use,
    const std::function<void(const LaneUse&, StreamSpan)>& add) {
  // A block starts when there is a slot, and a hop is free for it when the one
  // before has left it; unless it is over by then, which shows that the hop had
  // both at once.
  const auto begin_ns = [](int64_t ready_ns, int64_t free_ns, int64_t end_ns) {
    const int64_t both_ns = std::max(ready_ns, free_ns);
    return both_ns <= end_ns ? both_ns : std::min(ready_ns, end_ns);
  };
  const int64_t start_ns = TimeOf(use.link_gpu, use.start);
  std::vector<int64_t> slots(static_cast<size_t>(use.num_slots), start_ns);
  int64_t first_ns = start_ns;
  int64_t second_ns = start_ns;
  for (size_t i = 0; i < use.marks.size(); ++i) {
    const BlockMark& mark = use.marks[i];
    int64_t& slot_ns = slots[i % slots.size()];
    StreamSpan span = {.offset_bytes = mark.offset_bytes,
                       .size_bytes = mark.size_bytes,
                       .end_ns = TimeOf(use.link_gpu, mark.end)};
    if (mark.hop == nullptr) {
      span.start_ns = begin_ns(slot_ns, first_ns, span.end_ns);
      first_ns = std::max(first_ns, span.end_ns);
    } else {
      span.relayed_ns = TimeOf(use.link_gpu, mark.hop);
      span.start_ns = begin_ns(slot_ns, first_ns, span.relayed_ns);
      span.resumed_ns = begin_ns(span.relayed_ns, second_ns, span.end_ns);
      first_ns = std::max(first_ns, span.relayed_ns);
      second_ns = std::max(second_ns, span.end_ns);
    }
    slot_ns = span.end_ns;
    add(use, std::move(span));
  }
}

TransferRecord StreamEngine::RecordOf(const Flight& flight) {
  TransferRecord record = {.id = flight.id,
                           .call = std::string(flight.call),
                           .gpu = flight.gpu,
                           .direction = flight.direction,
                           .size_bytes = flight.size_bytes,
                           .num_reissued_blocks = flight.num_reissued_blocks,
                           .reissue_reason = flight.reissue_reason,
                           .status = flight.status,
                           .submitted_ns = flight.submitted_ns,
                           .started_ns = INT64_MAX};
  for (const LaneUse& use : flight.uses) {
    record.num_blocks += use.num_blocks;
    if (paths_[use.path].is_relay()) record.relayed_bytes += use.bytes;
    record.started_ns =
        std::min(record.started_ns, TimeOf(use.link_gpu, use.start));
    record.ended_ns = std::max(record.ended_ns, TimeOf(use.link_gpu, use.end));
  }
  return record;
}

void StreamEngine::SetEpochs() {
  for (auto& [gpu, epoch] : epochs_) {
    // The stream is empty: the event happens now, give or take microseconds.
    epoch.time_ns = streams_->NowNs();
    epoch.next_time_ns = 0;
    (void)streams_->Record(gpu, epoch.event, epoch.stream);
  }
}

void StreamEngine::RenewEpochs() {
  const int64_t now_ns = streams_->NowNs();
  for (auto& [gpu, epoch] : epochs_) {
    if (epoch.next_time_ns != 0) {
      const auto has_happened = streams_->IsDone(epoch.next);
      if (!has_happened.ok() || !*has_happened) continue;
      std::swap(epoch.event, epoch.next);
      epoch.time_ns = epoch.next_time_ns;
      epoch.next_time_ns = 0;
    } else if (now_ns - epoch.time_ns > kEpochNs) {
      epoch.next_time_ns = now_ns;
      if (!streams_->Record(gpu, epoch.next, epoch.stream).ok()) {
        epoch.next_time_ns = 0;
      }
    }
  }
}

void StreamEngine::DropPath(int path, const std::string& reason) {
  std::string& dropped = stats_.paths[path].dropped;
  if (!dropped.empty()) return;
  dropped = reason;
  ShowState(path);
  Say("GPU " + std::to_string(paths_[path].relay) +
      " does not lend its link to GPU " + std::to_string(paths_[path].gpu) +
      ": " + reason);
}

void StreamEngine::Say(std::string message) {
  if (log_) log_(message);
  messages_.push_back(std::move(message));
}

}  // namespace turbobus::engine

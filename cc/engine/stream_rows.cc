// Rows of a stack whose number only the device knows: the part of StreamEngine
// that fetches and stores them.

#include <algorithm>
#include <string>

#include "engine/stream_engine.h"
#include "sched/split.h"

namespace turbobus::engine {
namespace {

using topo::Direction;
using transport::MemoryKind;
using transport::RowCopy;

/// Rows on their way whose numbers the host has not read; more are not learnt
/// from.
constexpr size_t kMaxUnread = 1024;
/// A program whose stacks lie elsewhere at every call would fill memory.
constexpr size_t kMaxStacks = 256;

Direction DirectionOf(const RowRequest& request) {
  return request.row.is_store ? Direction::kD2h : Direction::kH2d;
}

RowCopy Part(const RowRequest& request, int64_t begin_bytes,
             int64_t end_bytes) {
  RowCopy part = request.row;
  part.begin_bytes = begin_bytes;
  part.end_bytes = end_bytes;
  part.seen = begin_bytes == 0 ? request.row.seen : nullptr;
  return part;
}

}  // namespace

StreamEngine::Guesses& StreamEngine::GuessesFor(const RowRequest& request) {
  Guesses& guesses = guesses_[{request.gpu, request.row.stack,
                               request.row.num_rows, request.row.row_bytes()}];
  guesses.last_used = ++num_guesses_;
  if (guesses_.size() > kMaxStacks) ForgetOldestStack();
  ReadSeen(guesses);
  return guesses;
}

void StreamEngine::ForgetOldestStack() {
  const auto oldest = std::ranges::min_element(
      guesses_, {}, [](const auto& entry) { return entry.second.last_used; });
  ReadSeen(oldest->second);
  stats_.num_guesses_right += oldest->second.predictor.num_right();
  stats_.num_guesses_wrong += oldest->second.predictor.num_wrong();
  guesses_.erase(oldest);
}

Status StreamEngine::CheckRow(const RowRequest& request) {
  const auto is_reachable = [this](const void* pointer) {
    return streams_->KindOf(pointer) != MemoryKind::kPageableHost;
  };
  for (const auto& [name, pointer] :
       {std::pair<const char*, const void*>{"stack", request.row.stack},
        {"row", request.row.row},
        {"index", request.row.index}}) {
    if (is_reachable(pointer)) continue;
    return InvalidArgument(
        std::string(request.call) + ": the " + name +
        " is in pageable host memory, which a GPU cannot read a row of; put "
        "the stack into memory kind pinned_host");
  }
  const int64_t stack_bytes = request.row.num_pieces * request.row.stride_bytes;
  const Span stack = {request.row.stack, stack_bytes};
  const Span row = {request.row.row, request.row.row_bytes()};
  return request.row.is_store
             ? OrderBehind(request.gpu, request.stream, row, stack)
             : OrderBehind(request.gpu, request.stream, stack, row);
}

Status StreamEngine::CopyRow(const RowRequest& request) {
  if (request.row.row_bytes() <= 0) return OkStatus();
  TB_RETURN_IF_ERROR(CheckRow(request));
  return LaunchRow(request, /*is_start=*/false);
}

Status StreamEngine::StartRow(const RowRequest& original) {
  RowRequest request = original;
  RowCopy& row = request.row;
  if (row.row_bytes() <= 0) return OkStatus();
  TB_RETURN_IF_ERROR(CheckRow(request));
  // Copy engines need the row's number now. Only a fetch can be undone.
  if (row.is_store || row.num_pieces != 1) return LaunchRow(request, true);
  int32_t guess = -1;
  {
    const std::lock_guard lock(mutex_);
    if (row.row_bytes() < settings_.min_pooled_bytes || settings_.is_disabled ||
        streams_->KindOf(row.stack) != MemoryKind::kPinnedHost) {
      // Too short to be worth a guess.
    } else if (Guesses& guesses = GuessesFor(request);
               guesses.seen.size() < kMaxUnread) {
      const int32_t next = guesses.predictor.Predict(request.run, row.num_rows);
      row.seen = NextWord();
      guesses.seen.push_back(row.seen);
      if (guesses.predictor.is_confident()) {
        guess = next;
        ++stats_.num_rows_guessed;
      }
    }
  }
  if (guess < 0) return LaunchRow(request, true);
  RowCopy fix = Part(request, 0, row.row_bytes());
  fix.skip_index = guess;
  return Launch({.call = request.call,
                 .gpu = request.gpu,
                 .direction = Direction::kH2d,
                 .stream = request.stream,
                 .run = request.run,
                 .src = row.stack + guess * row.piece_bytes,
                 .dst = row.row,
                 .size_bytes = row.row_bytes()},
                /*is_start=*/true, &fix);
}

Status StreamEngine::PlanRow(const RowRequest& request, bool is_start,
                             RowPlan& plan) {
  const int64_t size = request.row.row_bytes();
  const Direction direction = DirectionOf(request);
  const int direct_path = PathIndex(request.gpu, topo::kNoRelay, direction);
  plan.direct_bytes = size;
  if (direct_path < 0 || (settings_.is_disabled && !is_start)) {
    return OkStatus();
  }
  Poll();
  DirectLane* const direct =
      is_start ? lanes_.PickDirect(request.gpu, direction, request.stream)
               : nullptr;
  if (is_start && direct == nullptr) return OkStatus();

  std::vector<int> paths = {direct_path};
  std::vector<RowLane*> lanes = {nullptr};
  std::vector<sched::SplitLane> split = {
      LaneFor(direct_path, direct, request.stream)};
  // What was started runs beside compute: relays' cores are left alone.
  if (!is_start && size >= settings_.min_pooled_bytes &&
      streams_->KindOf(request.row.stack) == MemoryKind::kPinnedHost) {
    for (const int path :
         UsableRelays(request.gpu, direction, request.row.row)) {
      const int relay = paths_[path].relay;
      RowLane* const lane = lanes_.PickRows(relay, direction, request.stream);
      if (lane == nullptr || faults_.contains(relay)) continue;
      paths.push_back(path);
      lanes.push_back(lane);
      split.push_back(LaneFor(path, lane, request.stream));
    }
  }
  const std::vector<int64_t> shares = Share(paths, split, size);
  if (shares[0] == size && !is_start) return OkStatus();

  TB_ASSIGN_OR_RETURN(plan.flight,
                      NewFlight(request.call, request.gpu, direction,
                                request.stream, request.run));
  Flight& flight = *plan.flight;
  flight.src = request.row.is_store ? request.row.row : request.row.stack;
  flight.dst = request.row.is_store ? request.row.stack : request.row.row;
  flight.size_bytes = size;
  plan.direct = direct;
  plan.direct_bytes = shares[0];
  if (direct != nullptr) {
    TB_RETURN_IF_ERROR(AddUse(flight, direct_path, direct, shares[0]));
  }
  for (size_t i = 1; i < split.size(); ++i) {
    if (shares[i] == 0) continue;
    TB_RETURN_IF_ERROR(AddUse(flight, paths[i], lanes[i], shares[i]));
    plan.relays.emplace_back(lanes[i], shares[i]);
  }
  if (!plan.relays.empty()) plan.index = NextWord();
  for (const auto& [lane, bytes] : plan.relays) lane->user = plan.flight;
  if (direct != nullptr) direct->user = plan.flight;
  MarkContended(flight);
  flight.num_holders = 1;
  flights_.push_back(plan.flight);
  CountIssued(flight);
  return OkStatus();
}

Status StreamEngine::IssueRow(const RowRequest& request, RowPlan& plan) {
  Flight& flight = *plan.flight;
  if (plan.index != nullptr) {
    // A constant of the program lies in memory that peers do not reach.
    TB_RETURN_IF_ERROR(streams_->Copy(request.stream, plan.index,
                                      request.row.index, sizeof(int32_t)));
  }
  TB_RETURN_IF_ERROR(
      streams_->Record(flight.gpu, flight.begin, request.stream));
  const auto issue = [&](LaneUse& use, transport::Stream stream,
                         int64_t begin_bytes) {
    TB_RETURN_IF_ERROR(streams_->Wait(stream, flight.begin));
    TB_RETURN_IF_ERROR(streams_->Record(use.link_gpu, use.start, stream));
    RowCopy part = Part(request, begin_bytes, begin_bytes + use.bytes);
    if (use.link_gpu != flight.gpu) part.index = plan.index;
    const Status status = use.bytes == 0
                              ? OkStatus()
                              : streams_->CopyRow(use.link_gpu, stream, part);
    use.num_blocks = 1;
    const Status ended = streams_->Record(use.link_gpu, use.end, stream);
    return status.ok() ? ended : status;
  };
  size_t next = 0;
  if (plan.direct != nullptr) {
    TB_RETURN_IF_ERROR(issue(flight.uses[next++], plan.direct->stream, 0));
  }
  int64_t offset = plan.direct_bytes;
  for (const auto& [lane, bytes] : plan.relays) {
    LaneUse& use = flight.uses[next++];
    TB_RETURN_IF_ERROR(issue(use, lane->stream, offset));
    offset += bytes;
  }
  if (plan.direct == nullptr && plan.direct_bytes > 0) {
    TB_RETURN_IF_ERROR(streams_->CopyRow(flight.gpu, request.stream,
                                         Part(request, 0, plan.direct_bytes)));
  }
  return OkStatus();
}

Status StreamEngine::LaunchRow(const RowRequest& request, bool is_start) {
  const int64_t begin_ns = streams_->NowNs();
  RowPlan plan;
  {
    const std::lock_guard lock(mutex_);
    TB_RETURN_IF_ERROR(PlanRow(request, is_start, plan));
    ++stats_.num_rows_by_cores;
  }
  Status status;
  if (plan.flight == nullptr) {
    status = streams_->CopyRow(request.gpu, request.stream,
                               Part(request, 0, request.row.row_bytes()));
  } else {
    status = IssueRow(request, plan);
    if (!is_start || !status.ok()) {
      const Status joined = Join(plan.flight, request.stream);
      if (status.ok()) status = joined;
    }
  }
  const std::lock_guard lock(mutex_);
  FlightPtr flight = plan.flight;
  if (flight == nullptr) {
    BookPlain(request.gpu, DirectionOf(request), request.row.row_bytes(),
              status);
    if (is_start && status.ok()) {
      flight = NewLanded(request.call, request.gpu, DirectionOf(request),
                         request.stream, request.run);
    }
  } else {
    if (plan.direct == nullptr && plan.direct_bytes > 0 && status.ok()) {
      CountPlain(flight->gpu, flight->direction, plan.direct_bytes);
    }
    flight->status = status;
    flight->is_issued = true;
    flight->is_joined = !is_start;
    --flight->num_holders;
  }
  if (is_start && status.ok()) {
    AddStarted(request.gpu,
               request.row.is_store ? request.row.stack : request.row.row,
               flight);
  }
  handler_ns_.push_back(streams_->NowNs() - begin_ns);
  if (!status.ok()) return status.WithContext(request.call);
  return device_error_;
}

void StreamEngine::ReadSeen(Guesses& guesses) {
  // Each is written by a kernel, once, in order; before that it is 0.
  const auto read = [](const int32_t* slot) {
    return __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  };
  while (!guesses.seen.empty()) {
    if (const int32_t value = read(guesses.seen.front()); value != 0) {
      guesses.predictor.Observe(value - 1);
    } else if (guesses.seen.size() > 1 && read(guesses.seen[1]) != 0) {
      guesses.predictor.Forget();  // its program failed before it was done
    } else {
      return;
    }
    guesses.seen.pop_front();
  }
}

}  // namespace turbobus::engine

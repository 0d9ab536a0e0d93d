#include "engine/stream_engine.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace turbobus::engine {
namespace {

using topo::Direction;
using transport::MemoryKind;
using transport::RowCopy;
using transport::Stream;
using transport::Streams;

constexpr size_t kMaxHandlerTimes = 1024;
/// More than streams can have queued.
constexpr int64_t kWords = 16384;

const std::byte* Bytes(const void* pointer) {
  return static_cast<const std::byte*>(pointer);
}

bool Overlaps(const std::byte* a, int64_t a_bytes, const std::byte* b,
              int64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

StreamEngine::StreamEngine(std::unique_ptr<Streams> streams,
                           std::vector<topo::Path> paths,
                           const StreamSettings& settings, StreamLanes lanes)
    : streams_(std::move(streams)),
      paths_(std::move(paths)),
      settings_(settings),
      lanes_(std::move(lanes)),
      health_(paths_.size()),
      rivals_(paths_.size()),
      loans_(paths_.size()),
      num_started_(static_cast<size_t>(streams_->num_gpus())) {}

StatusOr<std::unique_ptr<StreamEngine>> StreamEngine::Create(
    std::unique_ptr<Streams> streams, std::vector<topo::Path> paths,
    const StreamSettings& settings) {
  TB_RETURN_IF_ERROR(Validate(settings));
  for (const topo::Path& path : paths) {
    const int num_gpus = streams->num_gpus();
    if (path.gpu < 0 || path.gpu >= num_gpus || path.relay >= num_gpus) {
      return InvalidArgument("a path of GPU " + std::to_string(path.gpu) +
                             " over GPU " + std::to_string(path.relay) +
                             ": this process sees " + std::to_string(num_gpus) +
                             " GPUs");
    }
    TB_RETURN_IF_ERROR(CheckRate(path.bandwidth_bytes_per_s));
  }
  std::vector<std::string> dropped;
  auto lanes =
      StreamLanes::Create(*streams, paths, settings.block_bytes, dropped);
  if (!lanes.ok()) return lanes.status();
  std::unique_ptr<StreamEngine> engine(
      new StreamEngine(std::move(streams), std::move(paths), settings,
                       std::move(lanes).value()));
  TB_RETURN_IF_ERROR(engine->SetUp(std::move(dropped)));
  return engine;
}

Status StreamEngine::SetUp(std::vector<std::string> dropped) {
  const std::lock_guard lock(mutex_);
  stats_.paths.resize(paths_.size());
  for (size_t i = 0; i < paths_.size(); ++i) {
    stats_.paths[i].path = paths_[i];
    if (!dropped[i].empty()) DropPath(static_cast<int>(i), dropped[i]);
  }
  stats_.staging_bytes = lanes_.staging_bytes();
  TB_ASSIGN_OR_RETURN(void* const ring,
                      streams_->AllocatePinnedHost(kWords * sizeof(int32_t)));
  words_ = static_cast<int32_t*>(ring);
  std::fill_n(words_, kWords, 0);
  for (int gpu = 0; gpu < streams_->num_gpus(); ++gpu) {
    Epoch& epoch = epochs_[gpu];
    TB_ASSIGN_OR_RETURN(epoch.stream, streams_->CreateStream(gpu));
    TB_ASSIGN_OR_RETURN(epoch.event, streams_->CreateEvent(gpu, true));
    TB_ASSIGN_OR_RETURN(epoch.next, streams_->CreateEvent(gpu, true));
  }
  SetEpochs();
  stats_.created_ns = streams_->NowNs();
  return OkStatus();
}

int32_t* StreamEngine::NextWord() {
  int32_t* const word = words_ + next_word_;
  next_word_ = (next_word_ + 1) % kWords;
  *word = 0;
  return word;
}

Status StreamEngine::Plain(const CopyRequest& request) {
  const Status status = streams_->Copy(request.stream, request.dst, request.src,
                                       request.size_bytes);
  const std::lock_guard lock(mutex_);
  BookPlain(request.gpu, request.direction, request.size_bytes, status);
  return status.ok() ? device_error_ : status;
}

void StreamEngine::BookPlain(int gpu, Direction direction, int64_t size_bytes,
                             const Status& status) {
  if (!status.ok()) {
    ++stats_.num_failed;
    return;
  }
  ++stats_.num_plain;
  stats_.plain_bytes += size_bytes;
  CountPlain(gpu, direction, size_bytes);
}

Status StreamEngine::Copy(const CopyRequest& request) {
  if (request.size_bytes <= 0) return OkStatus();
  TB_RETURN_IF_ERROR(OrderBehind(request.gpu, request.stream,
                                 {Bytes(request.src), request.size_bytes},
                                 {Bytes(request.dst), request.size_bytes}));
  return Launch(request, /*is_start=*/false, nullptr);
}

Status StreamEngine::Start(const CopyRequest& request) {
  if (request.size_bytes <= 0) return OkStatus();
  TB_RETURN_IF_ERROR(OrderBehind(request.gpu, request.stream,
                                 {Bytes(request.src), request.size_bytes},
                                 {Bytes(request.dst), request.size_bytes}));
  return Launch(request, /*is_start=*/true, nullptr);
}

Status StreamEngine::Launch(const CopyRequest& request, bool is_start,
                            const RowCopy* fix) {
  const int64_t begin_ns = streams_->NowNs();
  IssuePlan plan;
  {
    const std::lock_guard lock(mutex_);
    TB_RETURN_IF_ERROR(PlanCopy(request, is_start, plan));
  }
  if (plan.flight == nullptr) {
    TB_RETURN_IF_ERROR(Plain(request));
    if (!is_start) return OkStatus();
    // Nothing to overlap with, but `Done` must find it.
    const std::lock_guard lock(mutex_);
    const FlightPtr flight =
        NewLanded(request.call, request.gpu, request.direction, request.stream,
                  request.run);
    if (fix != nullptr) flight->fix = *fix;
    AddStarted(request.gpu, request.dst, flight);
    return OkStatus();
  }
  const FlightPtr& flight = plan.flight;
  if (fix != nullptr) flight->fix = *fix;
  std::vector<IssueFailure> failures;
  Status status = streams_->Record(flight->gpu, flight->begin, request.stream);
  if (status.ok()) status = Issue(*streams_, plan, failures);
  if (!is_start || !status.ok()) {
    // After an error too: what was issued must be over before the buffers go.
    const Status joined = Join(flight, request.stream);
    if (status.ok()) status = joined;
  }
  const std::lock_guard lock(mutex_);
  for (const IssueFailure& failure : failures) {
    const int path = flight->uses[failure.relay + 1].path;
    ++stats_.paths[path].num_failed;
    flight->num_reissued_blocks += failure.num_blocks;
    flight->reissue_reason = failure.status.message();
    DropPath(path, failure.status.message());
  }
  if (!status.ok()) ++stats_.paths[flight->uses[0].path].num_failed;
  flight->is_issued = true;
  flight->is_joined = !is_start;
  --flight->num_holders;
  ++(plan.relays.empty() ? stats_.num_direct : stats_.num_pooled);
  if (is_start && status.ok()) AddStarted(request.gpu, request.dst, flight);
  flight->status = status;
  handler_ns_.push_back(streams_->NowNs() - begin_ns);
  if (handler_ns_.size() > kMaxHandlerTimes) handler_ns_.pop_front();
  if (!status.ok()) return status.WithContext(request.call);
  return device_error_;
}

Status StreamEngine::Join(const FlightPtr& flight, Stream stream) {
  for (const LaneUse& use : flight->uses) {
    if (use.lane == nullptr && flight->stream == stream) continue;
    TB_RETURN_IF_ERROR(streams_->Wait(stream, use.end));
  }
  return OkStatus();
}

void StreamEngine::AddStarted(int gpu, const void* buffer,
                              const FlightPtr& flight) {
  in_flight_[{gpu, buffer}].push_back(flight);
  ++num_started_[gpu];
}

Status StreamEngine::OrderBehind(int gpu, Stream stream, Span read,
                                 Span written) {
  std::vector<FlightPtr> overlapping;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = in_flight_.lower_bound({gpu, nullptr});
         it != in_flight_.end() && it->first.first == gpu; ++it) {
      for (const FlightPtr& flight : it->second) {
        if (flight->is_finished) continue;
        const int64_t size = flight->size_bytes;
        if (Overlaps(flight->dst, size, read.first, read.second) ||
            Overlaps(flight->dst, size, written.first, written.second) ||
            Overlaps(flight->src, size, written.first, written.second)) {
          ++flight->num_holders;
          overlapping.push_back(flight);
        }
      }
    }
  }
  Status status;
  for (const FlightPtr& flight : overlapping) {
    const Status joined = Join(flight, stream);
    if (status.ok()) status = joined;
  }
  if (!overlapping.empty()) {
    const std::lock_guard lock(mutex_);
    for (const FlightPtr& flight : overlapping) --flight->num_holders;
  }
  return status;
}

FlightPtr StreamEngine::TakeStarted(const DoneRequest& request) {
  const auto here = in_flight_.find({request.gpu, request.buffer});
  if (here == in_flight_.end()) return nullptr;
  std::deque<FlightPtr>& started = here->second;
  const auto it = std::ranges::find(started, request.run, &Flight::run);
  if (it == started.end()) return nullptr;
  FlightPtr taken = std::move(*it);
  started.erase(it);
  if (started.empty()) in_flight_.erase(here);
  --num_started_[request.gpu];
  ++taken->num_holders;
  return taken;
}

std::vector<FlightPtr> StreamEngine::TakeRun(const LeaveRequest& request) {
  std::vector<FlightPtr> taken;
  for (auto it = in_flight_.lower_bound({request.gpu, nullptr});
       it != in_flight_.end() && it->first.first == request.gpu;) {
    std::erase_if(it->second, [&](const FlightPtr& flight) {
      if (flight->run != request.run) return false;
      ++flight->num_holders;
      taken.push_back(flight);
      return true;
    });
    it = it->second.empty() ? in_flight_.erase(it) : std::next(it);
  }
  num_started_[request.gpu] -= std::ssize(taken);
  return taken;
}

void StreamEngine::Release(Flight& flight, Stream joined) {
  --flight.num_holders;
  if (flight.stream == joined) flight.is_joined = true;
}

Status StreamEngine::Done(const DoneRequest& request) {
  FlightPtr flight;
  {
    const std::lock_guard lock(mutex_);
    flight = TakeStarted(request);
  }
  if (flight == nullptr) {
    return FailedPrecondition(
        std::string(request.call) +
        ": no transfer into this buffer is in flight. Its start and its done "
        "were separated by a copy: both must be in one body, without a loop, "
        "cond, jit or checkpoint edge in between");
  }
  Status status =
      flight->is_finished ? OkStatus() : Join(flight, request.stream);
  if (status.ok() && flight->fix.has_value()) {
    status = streams_->CopyRow(flight->gpu, request.stream, *flight->fix);
  }
  const std::lock_guard lock(mutex_);
  Release(*flight, request.stream);
  return status.ok() ? device_error_ : status;
}

void StreamEngine::Leave(const LeaveRequest& request) {
  if (num_started_[request.gpu] == 0) return;
  std::vector<FlightPtr> left;
  {
    const std::lock_guard lock(mutex_);
    left = TakeRun(request);
  }
  for (const FlightPtr& flight : left) {
    // If this fails the device is lost, and nothing is written any more.
    if (!flight->is_finished) (void)Join(flight, request.stream);
  }
  const std::lock_guard lock(mutex_);
  for (const FlightPtr& flight : left) Release(*flight, request.stream);
}

void StreamEngine::InjectFault(int relay) {
  const std::lock_guard lock(mutex_);
  faults_.insert(relay);
}

}  // namespace turbobus::engine

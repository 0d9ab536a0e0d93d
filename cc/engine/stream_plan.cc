// What of a transfer goes where: the part of StreamEngine that decides.

#include <algorithm>

#include "engine/stream_engine.h"
#include "sched/split.h"

namespace turbobus::engine {
namespace {

using topo::Direction;
using transport::MemoryKind;
using transport::Stream;

/// A backed-off relay gets this part of a transfer to prove itself with.
constexpr int64_t kProbeShare = 16;
/// More blocks than this would fill a stream's queue, and its caller would
/// wait.
constexpr int64_t kMaxBlocks = StreamLanes::kMaxQueuedBlocks / 2;

/// Blocks of a relay: an eighth of a middling transfer.
int64_t RelayBlock(int64_t size_bytes, int64_t block_bytes) {
  const int64_t min_block = std::max<int64_t>(block_bytes / 16, 4096);
  const int64_t share =
      (size_bytes / 8 + min_block - 1) / min_block * min_block;
  return std::clamp(share, std::min(min_block, block_bytes), block_bytes);
}

}  // namespace

int StreamEngine::PathIndex(int gpu, int relay, Direction direction) const {
  for (size_t i = 0; i < paths_.size(); ++i) {
    const topo::Path& path = paths_[i];
    if (path.gpu == gpu && path.relay == relay && path.direction == direction) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int StreamEngine::LinkGpu(int path) const {
  return paths_[path].is_relay() ? paths_[path].relay : paths_[path].gpu;
}

FlightPtr StreamEngine::NewLanded(std::string_view call, int gpu,
                                  Direction direction, Stream stream,
                                  int64_t run) {
  auto flight = std::make_shared<Flight>();
  flight->id = next_id_++;
  flight->call = call;
  flight->gpu = gpu;
  flight->direction = direction;
  flight->run = run;
  flight->stream = stream;
  flight->submitted_ns = streams_->NowNs();
  flight->is_issued = flight->is_joined = flight->is_finished = true;
  return flight;
}

StatusOr<FlightPtr> StreamEngine::NewFlight(std::string_view call, int gpu,
                                            Direction direction, Stream stream,
                                            int64_t run) {
  FlightPtr flight = NewLanded(call, gpu, direction, stream, run);
  flight->is_issued = flight->is_joined = flight->is_finished = false;
  TB_ASSIGN_OR_RETURN(flight->begin, TakeEvent(gpu, false));
  return flight;
}

Status StreamEngine::AddUse(Flight& flight, int path, const void* lane,
                            int64_t bytes) {
  LaneUse use;
  use.path = path;
  use.link_gpu = LinkGpu(path);
  use.lane = lane;
  use.bytes = bytes;
  use.expected_ns = static_cast<int64_t>(
      static_cast<double>(bytes) / paths_[path].bandwidth_bytes_per_s * 1e9);
  TB_ASSIGN_OR_RETURN(use.start, TakeEvent(use.link_gpu, true));
  TB_ASSIGN_OR_RETURN(use.end, TakeEvent(use.link_gpu, true));
  flight.uses.push_back(std::move(use));
  return OkStatus();
}

std::vector<int> StreamEngine::UsableRelays(int gpu, Direction direction,
                                            const void* device_pointer) {
  std::vector<int> usable;
  if (settings_.split == SplitPolicy::kDirect) return usable;
  for (size_t i = 0; i < paths_.size(); ++i) {
    const topo::Path& path = paths_[i];
    if (path.gpu != gpu || path.direction != direction || !path.is_relay()) {
      continue;
    }
    ShowState(static_cast<int>(i));  // a pause may be over
    if (!stats_.paths[i].dropped.empty() || rivals_[i].is_likely() ||
        loans_[i].is_paused(streams_->NowNs())) {
      continue;
    }
    // Memory of an allocator that gives peers no access: direct, this time.
    const Status reached =
        streams_->CheckPeerAccess(path.relay, device_pointer);
    stats_.paths[i].left_out = reached.message();
    if (reached.ok()) usable.push_back(static_cast<int>(i));
  }
  return usable;
}

StreamEngine::Load StreamEngine::LoadOn(int link_gpu, Direction direction,
                                        const void* lane, Stream stream) {
  Load load;
  const int64_t now_ns = streams_->NowNs();
  for (const FlightPtr& flight : flights_) {
    if (flight->direction != direction || flight->EndsBefore(stream)) continue;
    for (const LaneUse& use : flight->uses) {
      if (use.link_gpu != link_gpu) continue;
      if (flight->is_issued && !flight->has_begun) {
        const auto begun = streams_->IsDone(flight->begin);
        flight->has_begun = begun.ok() && *begun;
        flight->begun_ns = now_ns;
      }
      int64_t left = use.bytes;
      if (flight->has_begun) {
        left -= static_cast<int64_t>(
            static_cast<double>(now_ns - flight->begun_ns) / 1e9 *
            paths_[use.path].bandwidth_bytes_per_s);
      }
      if (left <= 0) continue;
      // Two of XLA's streams (null) are two lanes.
      (use.lane == lane && lane != nullptr ? load.fifo_bytes
                                           : load.shared_bytes) += left;
    }
  }
  return load;
}

void StreamEngine::MarkContended(Flight& flight) {
  for (const FlightPtr& other : flights_) {
    // The other direction too: together they are slower (host memory, PCIe).
    if (other.get() == &flight || other->EndsBefore(flight.stream)) {
      continue;
    }
    for (LaneUse& theirs : other->uses) {
      for (LaneUse& ours : flight.uses) {
        if (theirs.link_gpu == ours.link_gpu) {
          theirs.is_clean = ours.is_clean = false;
        }
      }
    }
  }
}

sched::SplitLane StreamEngine::LaneFor(int path, const void* lane,
                                       Stream stream) {
  const Load load = LoadOn(LinkGpu(path), paths_[path].direction, lane, stream);
  sched::SplitLane result = {
      .bandwidth_bytes_per_s = paths_[path].bandwidth_bytes_per_s,
      .latency_ns = paths_[path].is_relay() ? settings_.relay_latency_ns
                                            : settings_.direct_latency_ns,
      .fifo_bytes = load.fifo_bytes,
      .shared_bytes = load.shared_bytes};
  result.bandwidth_bytes_per_s *= health_[path].share();
  if (health_[path].is_backed_off()) result.max_bytes = 0;
  return result;
}

std::vector<int64_t> StreamEngine::Share(
    const std::vector<int>& paths, const std::vector<sched::SplitLane>& lanes,
    int64_t size_bytes) const {
  const auto num_lanes = static_cast<int64_t>(lanes.size());
  if (settings_.split == SplitPolicy::kEven) {
    const int64_t even = size_bytes / num_lanes / 4096 * 4096;
    std::vector<int64_t> shares(lanes.size(), even);
    shares[0] = size_bytes - even * (num_lanes - 1);
    return shares;
  }
  const sched::SplitOptions options = {.min_relay_bytes =
                                           settings_.min_pooled_bytes / 8};
  std::vector<int64_t> shares = sched::Split(lanes, size_bytes, options);
  // A relay that backed off has no share, but a probe where the direct lane
  // leaves it the time.
  for (size_t i = 1; i < lanes.size(); ++i) {
    if (!health_[paths[i]].is_backed_off()) continue;
    // What it would be late by is not known: it may well be on time again. By
    // the rate that it showed it might never be asked again.
    sched::SplitLane on_time = lanes[i];
    on_time.bandwidth_bytes_per_s = paths_[paths[i]].bandwidth_bytes_per_s;
    const int64_t probe =
        std::min(settings_.block_bytes, size_bytes / kProbeShare) / 4096 * 4096;
    if (probe < options.min_relay_bytes || probe > shares[0] ||
        sched::FinishNs(on_time, static_cast<double>(probe)) >
            sched::FinishNs(lanes[0], static_cast<double>(shares[0] - probe))) {
      continue;
    }
    shares[i] = probe;
    shares[0] -= probe;
  }
  return shares;
}

Status StreamEngine::PlanCopy(const CopyRequest& request, bool is_start,
                              IssuePlan& plan) {
  const int64_t size = request.size_bytes;
  const int direct_path =
      PathIndex(request.gpu, topo::kNoRelay, request.direction);
  const bool is_h2d = request.direction == Direction::kH2d;
  const void* const host = is_h2d ? request.src : request.dst;
  const void* const device = is_h2d ? request.dst : request.src;
  if (direct_path < 0 ||
      (!is_start &&
       (settings_.is_disabled || size < settings_.min_pooled_bytes)) ||
      streams_->KindOf(host) != MemoryKind::kPinnedHost ||
      streams_->KindOf(device) != MemoryKind::kDevice) {
    return OkStatus();
  }
  Poll();
  // A copy's own part may as well be on XLA's stream, where it starts and ends
  // without waiting for another one.
  DirectLane* direct = nullptr;
  if (is_start || settings_.is_lock_step) {
    direct = lanes_.PickDirect(request.gpu, request.direction, request.stream);
    if (direct == nullptr) return OkStatus();
  }

  std::vector<int> paths = {direct_path};
  std::vector<sched::SplitLane> split = {
      LaneFor(direct_path, direct, request.stream)};
  std::vector<IssuePlan::Relay> relays;
  if (size >= settings_.min_pooled_bytes && !settings_.is_disabled) {
    for (const int path :
         UsableRelays(request.gpu, request.direction, device)) {
      const int relay = paths_[path].relay;
      IssuePlan::Relay part;
      part.slots = lanes_.PickSlots(relay, request.gpu, request.direction,
                                    request.stream, next_id_);
      if (part.slots.empty()) continue;
      part.has_fault = faults_.contains(relay);
      paths.push_back(path);
      split.push_back(LaneFor(path, part.slots[0], request.stream));
      split.back().max_bytes =
          std::min(split.back().max_bytes, kMaxBlocks * lanes_.slot_bytes());
      relays.push_back(std::move(part));
    }
  }
  const std::vector<int64_t> shares = Share(paths, split, size);
  const bool is_pooled = shares[0] < size;
  // A yielding lane for what is long enough to be in another's way.
  if (!is_pooled && !is_start && size <= 2 * settings_.block_bytes) {
    return OkStatus();
  }

  TB_ASSIGN_OR_RETURN(plan.flight,
                      NewFlight(request.call, request.gpu, request.direction,
                                request.stream, request.run));
  Flight& flight = *plan.flight;
  flight.src = static_cast<const std::byte*>(request.src);
  flight.dst = static_cast<std::byte*>(request.dst);
  flight.size_bytes = size;
  plan.direct_stream = direct == nullptr ? request.stream : direct->stream;
  plan.direct_round = direct == nullptr ? nullptr : direct->round;
  plan.direct_bytes = shares[0];
  plan.direct_block_bytes =
      settings_.is_disabled
          ? size
          : std::max(settings_.block_bytes, shares[0] / kMaxBlocks + 1);
  plan.relay_block_bytes =
      std::min(lanes_.slot_bytes(), RelayBlock(size, settings_.block_bytes));
  plan.is_lock_step = settings_.is_lock_step;
  plan.relay_streams =
      settings_.is_lock_step ? RelayStreams::kPerLeg : settings_.relay_streams;
  plan.yield_bytes = settings_.has_yields ? settings_.block_bytes / 8 : 0;
  if (settings_.is_traced) {
    plan.make_mark = [this](int gpu) {
      const std::lock_guard lock(mutex_);
      return TakeEvent(gpu, true);
    };
  }
  TB_RETURN_IF_ERROR(AddUse(flight, direct_path, direct, shares[0]));
  for (size_t i = 1; i < split.size(); ++i) {
    if (shares[i] == 0) continue;
    IssuePlan::Relay& part = relays[i - 1];
    part.bytes = shares[i];
    TB_RETURN_IF_ERROR(AddUse(flight, paths[i], part.slots[0], shares[i]));
    flight.uses.back().num_slots = static_cast<int>(part.slots.size());
    plan.relays.push_back(std::move(part));
  }
  // Nothing can fail any more: take the lanes.
  if (direct != nullptr) {
    direct->user = plan.flight;
    direct->queued_blocks +=
        static_cast<int>(shares[0] / plan.direct_block_bytes) + 1;
  }
  for (const IssuePlan::Relay& part : plan.relays) {
    for (RelaySlot* slot : part.slots) {
      slot->user = plan.flight;
      slot->queued_blocks +=
          static_cast<int>(part.bytes / plan.relay_block_bytes) + 6;
    }
  }
  MarkContended(flight);
  flight.num_holders = 1;
  flights_.push_back(plan.flight);
  CountIssued(flight);
  return OkStatus();
}

}  // namespace turbobus::engine

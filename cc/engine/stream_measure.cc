// How fast paths are, alone and together: the part of StreamEngine that
// `python -m jax_turbobus profile` uses.

#include <algorithm>
#include <chrono>
#include <thread>

#include "engine/stream_engine.h"

namespace turbobus::engine {
namespace {

using transport::Streams;

/// Memory that goes when the measurement is over.
class Scratch {
 public:
  explicit Scratch(Streams& streams) : streams_(streams) {}
  ~Scratch() {
    for (void* const memory : memory_) streams_.Free(memory);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  StatusOr<std::byte*> Keep(StatusOr<void*> memory) {
    if (!memory.ok()) return memory.status();
    memory_.push_back(*memory);
    return static_cast<std::byte*>(*memory);
  }

 private:
  Streams& streams_;
  std::vector<void*> memory_;
};

}  // namespace

StatusOr<std::vector<double>> StreamEngine::Measure(
    const std::vector<int>& paths, int64_t size_bytes, int64_t block_bytes) {
  for (const int path : paths) {
    if (path < 0 || path >= static_cast<int>(paths_.size())) {
      return InvalidArgument("no path " + std::to_string(path));
    }
  }
  if (size_bytes <= 0 || block_bytes <= 0 ||
      block_bytes > lanes_.slot_bytes()) {
    return InvalidArgument(
        "expected sizes of at least 1 byte and blocks of at "
        "most " +
        std::to_string(lanes_.slot_bytes()) + " bytes");
  }
  Scratch scratch(*streams_);
  std::vector<IssuePlan> plans(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) {
    const topo::Path& path = paths_[paths[i]];
    TB_ASSIGN_OR_RETURN(std::byte* const host,
                        scratch.Keep(streams_->AllocatePinnedHost(size_bytes)));
    TB_ASSIGN_OR_RETURN(
        std::byte* const device,
        scratch.Keep(streams_->AllocateDevice(path.gpu, size_bytes)));
    const std::lock_guard lock(mutex_);
    Poll();
    const transport::Stream gate = epochs_[path.gpu].stream;
    IssuePlan& plan = plans[i];
    TB_ASSIGN_OR_RETURN(
        plan.flight,
        NewFlight("profile", path.gpu, path.direction, gate, /*run=*/0));
    Flight& flight = *plan.flight;
    const bool is_h2d = path.direction == topo::Direction::kH2d;
    flight.src = is_h2d ? host : device;
    flight.dst = is_h2d ? device : host;
    flight.size_bytes = size_bytes;
    DirectLane* const direct =
        lanes_.PickDirect(path.gpu, path.direction, gate);
    if (direct == nullptr) return Unavailable("no idle direct lane");
    plan.direct_stream = direct->stream;
    plan.direct_round = direct->round;
    plan.direct_block_bytes = plan.relay_block_bytes = block_bytes;
    plan.relay_streams = settings_.relay_streams;
    plan.yield_bytes = settings_.has_yields ? block_bytes : 0;
    const int direct_path = PathIndex(path.gpu, topo::kNoRelay, path.direction);
    plan.direct_bytes = path.is_relay() ? 0 : size_bytes;
    TB_RETURN_IF_ERROR(AddUse(flight, direct_path, direct, plan.direct_bytes));
    if (path.is_relay()) {
      IssuePlan::Relay relay;
      relay.slots = lanes_.PickSlots(path.relay, path.gpu, path.direction, gate,
                                     INT64_MAX / 2);
      relay.bytes = size_bytes;
      if (relay.slots.empty()) {
        return Unavailable("GPU " + std::to_string(path.relay) +
                           " lends nothing: " + stats_.paths[paths[i]].dropped);
      }
      for (RelaySlot* slot : relay.slots) slot->user = plan.flight;
      TB_RETURN_IF_ERROR(AddUse(flight, paths[i], relay.slots[0], size_bytes));
      plan.relays.push_back(std::move(relay));
    }
    direct->user = plan.flight;
    for (LaneUse& use : flight.uses) use.is_clean = false;
  }
  for (IssuePlan& plan : plans) {
    TB_RETURN_IF_ERROR(streams_->Record(plan.flight->gpu, plan.flight->begin,
                                        plan.flight->stream));
    std::vector<IssueFailure> failures;
    TB_RETURN_IF_ERROR(Issue(*streams_, plan, failures));
    if (!failures.empty()) return failures[0].status;
  }
  std::vector<double> rates;
  for (const IssuePlan& plan : plans) {
    for (const LaneUse& use : plan.flight->uses) {
      while (true) {
        TB_ASSIGN_OR_RETURN(const bool is_done, streams_->IsDone(use.end));
        if (is_done) break;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    const LaneUse& use = plan.flight->uses.back();
    TB_ASSIGN_OR_RETURN(const int64_t elapsed_ns,
                        streams_->ElapsedNs(use.start, use.end));
    rates.push_back(static_cast<double>(size_bytes) /
                    static_cast<double>(std::max<int64_t>(elapsed_ns, 1)) *
                    1e9);
    const std::lock_guard lock(mutex_);
    plan.flight->is_issued = true;
    flights_.push_back(plan.flight);
  }
  const std::lock_guard lock(mutex_);
  Poll();
  return rates;
}

}  // namespace turbobus::engine

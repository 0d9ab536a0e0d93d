#include "transport/host/link_emulator.h"

#include <algorithm>
#include <limits>
#include <string>

namespace turbobus::transport::host {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

}  // namespace

LinkEmulator::LinkEmulator(LinkModel model)
    : model_(std::move(model)),
      flows_(model_.rates_bytes_per_s),
      lanes_(model_.lanes.size()),
      stagings_(model_.num_stagings) {
  for (Staging& staging : stagings_) {
    for (int slot = model_.num_slots - 1; slot >= 0; --slot) {
      staging.free_slots.push_back(slot);
    }
  }
}

Status LinkEmulator::Issue(uint64_t id, int lane, int64_t size_bytes,
                           int64_t now_ns) {
  if (lane < 0 || lane >= std::ssize(lanes_)) {
    return InvalidArgument("lane: expected 0 to " +
                           std::to_string(std::ssize(lanes_) - 1) + ", got " +
                           std::to_string(lane));
  }
  Advance(now_ns);
  if (lanes_[lane].removed) return *lanes_[lane].removed;
  const auto [it, is_new] = blocks_.try_emplace(
      id, Block{.lane = lane, .size_bytes = size_bytes, .done = {.id = id}});
  if (!is_new) {
    return {StatusCode::kAlreadyExists,
            "block " + std::to_string(id) + " is in flight already"};
  }
  lanes_[lane].queue[0].push_back(id);
  StartWaiting(lane, 0);
  return OkStatus();
}

void LinkEmulator::CopyDone(uint64_t id, int64_t now_ns) {
  Advance(now_ns);
  const auto it = blocks_.find(id);
  if (it == blocks_.end() || !it->second.is_copying) return;
  it->second.is_copying = false;
  if (it->second.has_streamed && !it->second.abort) ++num_late_copies_;
  MaybeEndHop(id);
}

void LinkEmulator::Abort(uint64_t id, const Status& reason, int64_t now_ns) {
  Advance(now_ns);
  const auto it = blocks_.find(id);
  if (it == blocks_.end() || it->second.abort) return;
  it->second.abort = reason;
  MaybeEndHop(id);
}

void LinkEmulator::RemoveLane(int lane, const Status& reason, int64_t now_ns) {
  Advance(now_ns);
  if (lanes_[lane].removed) return;
  lanes_[lane].removed = reason;
  std::vector<uint64_t> ids;
  for (const auto& [id, block] : blocks_) {
    if (block.lane == lane) ids.push_back(id);
  }
  for (const uint64_t id : ids) Abort(id, reason, now_ns);
}

void LinkEmulator::SlowLane(int lane, double factor, int64_t now_ns) {
  Advance(now_ns);
  lanes_[lane].slow_factor = factor;
  for (const auto& [id, block] : blocks_) {
    if (block.lane == lane && block.flow) {
      flows_.SetMaxRate(*block.flow, MaxRate(block), now_ns_);
    }
  }
}

void LinkEmulator::Advance(int64_t now_ns) {
  while (true) {
    const std::optional<FlowModel::End> end = flows_.NextEnd();
    const bool has_latency = !latencies_.empty();
    const int64_t latency_ns = has_latency ? latencies_.begin()->first : 0;
    if (end && end->time_ns <= now_ns &&
        (!has_latency || end->time_ns <= latency_ns)) {
      now_ns_ = std::max(now_ns_, end->time_ns);
      const uint64_t id = block_of_flow_.at(end->flow);
      Block& block = blocks_.at(id);
      StopFlow(block);
      block.has_streamed = true;
      MaybeEndHop(id);
    } else if (has_latency && latency_ns <= now_ns) {
      now_ns_ = std::max(now_ns_, latency_ns);
      const uint64_t id = latencies_.begin()->second;
      latencies_.erase(latencies_.begin());
      StartFlow(id, blocks_.at(id));
    } else {
      break;
    }
  }
  now_ns_ = std::max(now_ns_, now_ns);
}

std::optional<int64_t> LinkEmulator::NextEventNs() const {
  std::optional<int64_t> next;
  if (const auto end = flows_.NextEnd()) next = end->time_ns;
  if (!latencies_.empty()) {
    const int64_t latency_ns = latencies_.begin()->first;
    next = next ? std::min(*next, latency_ns) : latency_ns;
  }
  return next;
}

void LinkEmulator::StartWaiting(int lane_index, int hop) {
  Lane& lane = lanes_[lane_index];
  if (lane.removed) return;
  while (!lane.queue[hop].empty() &&
         lane.num_active[hop] < model_.lanes[lane_index].num_parallel) {
    const uint64_t id = lane.queue[hop].front();
    Block& block = blocks_.at(id);
    if (hop == 0 && model_.lanes[lane_index].staging >= 0 &&
        !TakeSlot(lane_index, block)) {
      return;
    }
    lane.queue[hop].pop_front();
    ++lane.num_active[hop];
    StartHop(id, block);
  }
}

bool LinkEmulator::TakeSlot(int lane_index, Block& block) {
  Lane& lane = lanes_[lane_index];
  Staging& staging = stagings_[model_.lanes[lane_index].staging];
  if (staging.free_slots.empty()) {
    if (!lane.is_waiting_for_slot) {
      lane.is_waiting_for_slot = true;
      staging.waiting_lanes.push_back(lane_index);
    }
    return false;
  }
  block.slot = staging.free_slots.back();
  staging.free_slots.pop_back();
  ++lane.num_slots_held;
  return true;
}

void LinkEmulator::ReleaseSlot(Block& block) {
  if (block.slot < 0) return;
  Staging& staging = stagings_[model_.lanes[block.lane].staging];
  staging.free_slots.push_back(std::exchange(block.slot, -1));
  --lanes_[block.lane].num_slots_held;
  while (!staging.free_slots.empty() && !staging.waiting_lanes.empty()) {
    // The lane that holds the fewest: two lanes that borrow get a buffer each.
    const auto next = std::ranges::min_element(
        staging.waiting_lanes, {},
        [this](int lane) { return lanes_[lane].num_slots_held; });
    const int lane = *next;
    staging.waiting_lanes.erase(next);
    lanes_[lane].is_waiting_for_slot = false;
    StartWaiting(lane, 0);
  }
}

void LinkEmulator::StartHop(uint64_t id, Block& block) {
  const HopModel& hop = model_.lanes[block.lane].hops[block.hop];
  block.is_active = true;
  block.is_copying = true;
  block.has_streamed = false;
  (block.hop == 0 ? block.done.start_ns : block.done.resumed_ns) = now_ns_;
  copies_.push_back(
      {.id = id, .lane = block.lane, .hop = block.hop, .slot = block.slot});
  if (hop.latency_ns > 0) {
    latencies_.emplace(now_ns_ + hop.latency_ns, id);
  } else {
    StartFlow(id, block);
  }
}

void LinkEmulator::StartFlow(uint64_t id, Block& block) {
  block.flow = flows_.Start(model_.lanes[block.lane].hops[block.hop].resources,
                            block.size_bytes, MaxRate(block), now_ns_);
  block_of_flow_[*block.flow] = id;
}

void LinkEmulator::StopFlow(Block& block) {
  if (!block.flow) return;
  flows_.Remove(*block.flow, now_ns_);
  block_of_flow_.erase(*block.flow);
  block.flow.reset();
}

void LinkEmulator::MaybeEndHop(uint64_t id) {
  Block& block = blocks_.at(id);
  if (block.is_copying) return;
  if (block.abort) {
    EndBlock(id, *block.abort);
    return;
  }
  if (!block.has_streamed) return;
  if (block.hop + 1 == std::ssize(model_.lanes[block.lane].hops)) {
    EndBlock(id, OkStatus());
    return;
  }
  Lane& lane = lanes_[block.lane];
  const int lane_index = block.lane;
  --lane.num_active[block.hop];
  block.done.relayed_ns = now_ns_;
  block.is_active = false;
  ++block.hop;
  lane.queue[block.hop].push_back(id);
  StartWaiting(lane_index, 1);
  StartWaiting(lane_index, 0);
}

void LinkEmulator::EndBlock(uint64_t id, Status status) {
  Block& block = blocks_.at(id);
  const int lane_index = block.lane;
  const int hop = block.hop;
  Lane& lane = lanes_[lane_index];
  StopFlow(block);
  std::erase_if(latencies_,
                [id](const auto& entry) { return entry.second == id; });
  if (block.is_active) {
    --lane.num_active[hop];
  } else {
    std::erase(lane.queue[hop], id);
    if (hop == 0) block.done.start_ns = now_ns_;  // It has never started.
  }
  block.done.status = std::move(status);
  block.done.end_ns = now_ns_;
  done_.push_back(block.done);
  ReleaseSlot(block);
  blocks_.erase(id);
  StartWaiting(lane_index, hop);
  if (hop == 1) StartWaiting(lane_index, 0);
}

// A slow lane is held to a fraction of what its slowest link carries alone.
double LinkEmulator::MaxRate(const Block& block) const {
  const double factor = lanes_[block.lane].slow_factor;
  if (factor == 1) return kUnlimited;
  double rate = kUnlimited;
  for (const int resource :
       model_.lanes[block.lane].hops[block.hop].resources) {
    rate = std::min(rate, model_.rates_bytes_per_s[resource]);
  }
  return rate / factor;
}

}  // namespace turbobus::transport::host

#include "sched/tables.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace turbobus::sched {
namespace {

/// More would overflow sums of rates; no memory is near it.
constexpr double kMaxBytesPerS = 1e15;

std::string Field(const char* list, size_t i, const char* member) {
  return std::string(list) + "[" + std::to_string(i) + "]." + member;
}

Status Positive(const std::string& field, int64_t value) {
  if (value > 0) return OkStatus();
  return InvalidArgument(field + ": expected a positive number, got " +
                         std::to_string(value));
}

Status ValidRate(const std::string& field, double rate) {
  if (rate >= 1 && rate <= kMaxBytesPerS) return OkStatus();
  return InvalidArgument(field +
                         ": expected bytes per second in [1, 1e15], got " +
                         std::to_string(rate));
}

Status ValidateLane(const Config& config, size_t i) {
  const LaneSpec& spec = config.lanes[i];
  TB_RETURN_IF_ERROR(ValidRate(Field("lanes", i, "path.bandwidth_bytes_per_s"),
                               spec.path.bandwidth_bytes_per_s));
  TB_RETURN_IF_ERROR(
      Positive(Field("lanes", i, "window_bytes"), spec.window_bytes));
  if (spec.path.latency_ns < 0) {
    return InvalidArgument(Field("lanes", i, "path.latency_ns") +
                           ": expected nanoseconds >= 0, got " +
                           std::to_string(spec.path.latency_ns));
  }
  if (spec.path.gpu < 0) {
    return InvalidArgument(Field("lanes", i, "path.gpu") +
                           ": expected a GPU's index, got " +
                           std::to_string(spec.path.gpu));
  }
  if (spec.path.relay < topo::kNoRelay || spec.path.relay == spec.path.gpu) {
    return InvalidArgument(Field("lanes", i, "path.relay") +
                           ": expected another GPU than " +
                           std::to_string(spec.path.gpu) +
                           " (the lane's own), or -1 for none, got " +
                           std::to_string(spec.path.relay));
  }
  for (int cap : spec.caps) {
    if (cap < 0 || static_cast<size_t>(cap) >= config.caps.size()) {
      return InvalidArgument(Field("lanes", i, "caps") + ": there is no cap " +
                             std::to_string(cap) + " among the " +
                             std::to_string(config.caps.size()) + " of `caps`");
    }
  }
  for (size_t j = 0; j < i; ++j) {
    const topo::Path& other = config.lanes[j].path;
    if (other.gpu == spec.path.gpu && other.relay == spec.path.relay &&
        other.numa_node == spec.path.numa_node &&
        other.direction == spec.path.direction) {
      return InvalidArgument(
          Field("lanes", i, "path") +
          ": same GPU, relay, direction and NUMA node as lanes[" +
          std::to_string(j) + "]; give each path one lane");
    }
  }
  return OkStatus();
}

Status Validate(const Config& config) {
  if (config.lanes.empty()) {
    return InvalidArgument("lanes: expected at least one lane, got none");
  }
  TB_RETURN_IF_ERROR(Positive("block_bytes", config.block_bytes));
  if (config.chunk_bytes < config.block_bytes) {
    return InvalidArgument("chunk_bytes: expected at least one block of " +
                           std::to_string(config.block_bytes) + ", got " +
                           std::to_string(config.chunk_bytes));
  }
  if (!(config.late_factor >= 1)) {
    return InvalidArgument("late_factor: expected a number >= 1, got " +
                           std::to_string(config.late_factor));
  }
  TB_RETURN_IF_ERROR(Positive("probe_interval_ns", config.probe_interval_ns));
  if (config.max_probe_interval_ns < config.probe_interval_ns) {
    return InvalidArgument(
        "max_probe_interval_ns: expected at least probe_interval_ns = " +
        std::to_string(config.probe_interval_ns) + ", got " +
        std::to_string(config.max_probe_interval_ns));
  }
  for (size_t i = 0; i < config.caps.size(); ++i) {
    TB_RETURN_IF_ERROR(ValidRate(Field("caps", i, "bandwidth_bytes_per_s"),
                                 config.caps[i].bandwidth_bytes_per_s));
  }
  for (size_t i = 0; i < config.lanes.size(); ++i) {
    TB_RETURN_IF_ERROR(ValidateLane(config, i));
  }
  return OkStatus();
}

/// Finds or makes the entries that lanes belong to.
class Builder {
 public:
  explicit Builder(Tables& tables) : tables_(tables) {}

  void Build() {
    for (const CapSpec& cap : tables_.config.caps) {
      tables_.caps.push_back(
          {.bandwidth_bytes_per_s = std::llround(cap.bandwidth_bytes_per_s)});
    }
    for (const LaneSpec& spec : tables_.config.lanes) AddLane(spec);
    for (Queue& queue : tables_.queues) {
      queue.relay_links = BitSet(static_cast<int>(tables_.links.size()));
      queue.deferred_links = queue.relay_links;
      for (int lane : queue.relays) {
        queue.relay_links.Add(tables_.lanes[lane].host_link);
      }
    }
    for (Lane& lane : tables_.lanes) {
      HostLink& link = tables_.links[lane.host_link];
      if (link.ns_per_byte == 0 || lane.ns_per_byte < link.ns_per_byte) {
        link.ns_per_byte = lane.ns_per_byte;
      }
      const int direct = tables_.queues[lane.queue].direct;
      if (!lane.is_relay || direct == kNone) continue;
      lane.block_part =
          std::min(1.0, tables_.lanes[direct].ns_per_byte / lane.ns_per_byte);
      // Two blocks: one that moves and one behind it.
      const double ahead = 2.0 * lane.block_part *
                           static_cast<double>(tables_.config.block_bytes);
      lane.window_bytes = std::min(lane.window_bytes,
                                   std::max<int64_t>(std::llround(ahead), 1));
    }
  }

 private:
  struct LinkKey {
    int gpu;
    topo::Direction direction;
  };

  int LinkOf(int gpu, topo::Direction direction) {
    for (size_t i = 0; i < keys_.size(); ++i) {
      if (keys_[i].gpu == gpu && keys_[i].direction == direction) {
        return static_cast<int>(i);
      }
    }
    keys_.push_back({gpu, direction});
    tables_.links.emplace_back();
    return static_cast<int>(keys_.size()) - 1;
  }

  int QueueOf(const topo::Path& path) {
    for (size_t i = 0; i < tables_.queues.size(); ++i) {
      const Queue& queue = tables_.queues[i];
      if (queue.gpu == path.gpu && queue.direction == path.direction &&
          queue.numa_node == path.numa_node) {
        return static_cast<int>(i);
      }
    }
    const int index = static_cast<int>(tables_.queues.size());
    Queue& queue = tables_.queues.emplace_back();
    queue.gpu = path.gpu;
    queue.direction = path.direction;
    queue.numa_node = path.numa_node;
    queue.host_link = LinkOf(path.gpu, path.direction);
    tables_.links[queue.host_link].queues.push_back(index);
    return index;
  }

  void AddLane(const LaneSpec& spec) {
    const topo::Path& path = spec.path;
    const int index = static_cast<int>(tables_.lanes.size());
    Lane& lane = tables_.lanes.emplace_back();
    lane.queue = QueueOf(path);
    lane.is_relay = path.is_relay();
    lane.host_link =
        LinkOf(lane.is_relay ? path.relay : path.gpu, path.direction);
    lane.ns_per_byte = 1e9 / path.bandwidth_bytes_per_s;
    lane.rate_bytes_per_s = std::llround(path.bandwidth_bytes_per_s);
    lane.latency_ns = path.latency_ns;
    lane.window_bytes = spec.window_bytes;
    lane.caps = spec.caps;
    lane.late = LateDetector(
        {.late_factor = tables_.config.late_factor,
         .probe_interval_ns = tables_.config.probe_interval_ns,
         .max_probe_interval_ns = tables_.config.max_probe_interval_ns});
    Queue& queue = tables_.queues[lane.queue];
    queue.total_rate_bytes_per_s += lane.rate_bytes_per_s;
    if (lane.is_relay) {
      queue.relays.push_back(index);
      HostLink& link = tables_.links[lane.host_link];
      link.borrowers.push_back(index);
      link.relay_window_bytes =
          std::max(link.relay_window_bytes, spec.window_bytes);
    } else {
      queue.direct = index;
      queue.has_direct = true;
    }
  }

  Tables& tables_;
  std::vector<LinkKey> keys_;
};

}  // namespace

StatusOr<Tables> Tables::Create(Config config) {
  TB_RETURN_IF_ERROR(Validate(config));
  Tables tables;
  tables.config = std::move(config);
  Builder(tables).Build();
  return tables;
}

int Tables::FindQueue(int gpu, topo::Direction direction, int numa_node) const {
  int found = kNone;
  for (size_t i = 0; i < queues.size(); ++i) {
    const Queue& queue = queues[i];
    if (queue.gpu != gpu || queue.direction != direction || !queue.has_direct) {
      continue;
    }
    if (queue.numa_node == numa_node) return static_cast<int>(i);
    if (found == kNone) found = static_cast<int>(i);
  }
  return found;
}

}  // namespace turbobus::sched

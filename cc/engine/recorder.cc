#include "engine/recorder.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace turbobus::engine {
namespace {

constexpr double kNsPerSecond = 1e9;

// A relayed block crosses one hop after the other.
double NsPerByte(const topo::Path& path,
                 const std::vector<std::vector<int>>& hops,
                 const std::vector<LinkLabel>& links) {
  double ns_per_byte = 0;
  for (const std::vector<int>& hop : hops) {
    double slowest = 0;
    for (const int link : hop) {
      slowest =
          std::max(slowest, kNsPerSecond / links[link].bandwidth_bytes_per_s);
    }
    ns_per_byte += slowest;
  }
  if (std::isfinite(ns_per_byte) && ns_per_byte > 0) return ns_per_byte;
  return path.bandwidth_bytes_per_s > 0
             ? kNsPerSecond / path.bandwidth_bytes_per_s
             : 0;
}

std::string DirectionName(topo::Direction direction) {
  return direction == topo::Direction::kH2d ? "h2d" : "d2h";
}

}  // namespace

Labels DefaultLabels(const std::vector<topo::Path>& paths) {
  Labels labels;
  int num_links = 0;
  for (const topo::Path& path : paths) {
    for (const int link : path.links) num_links = std::max(num_links, link + 1);
  }
  for (int link = 0; link < num_links; ++link) {
    for (const auto direction :
         {topo::Direction::kH2d, topo::Direction::kD2h}) {
      labels.links.push_back({.name = "link" + std::to_string(link) + " " +
                                      DirectionName(direction)});
    }
  }
  for (const topo::Path& path : paths) {
    std::string name =
        "gpu" + std::to_string(path.gpu) + " " + DirectionName(path.direction);
    if (path.is_relay()) name += " via gpu" + std::to_string(path.relay);
    labels.lanes.push_back(std::move(name));
    // Without a topology nobody knows where the relay splits the links.
    std::vector<int> links;
    for (const int link : path.links) {
      links.push_back(2 * link + static_cast<int>(path.direction));
    }
    labels.lane_links.push_back({std::move(links)});
  }
  return labels;
}

Recorder::Recorder(const std::vector<topo::Path>& paths, double late_factor,
                   Options options, int64_t now_ns)
    : late_factor_(late_factor),
      trace_capacity_(std::max<int64_t>(options.trace_capacity, 0)) {
  const bool has_labels = options.labels.lanes.size() == paths.size() &&
                          options.labels.lane_links.size() == paths.size();
  Labels labels = has_labels ? std::move(options.labels) : DefaultLabels(paths);
  lane_links_ = std::move(labels.lane_links);
  stats_.created_ns = now_ns;
  for (size_t i = 0; i < paths.size(); ++i) {
    LaneStats lane;
    lane.name = labels.lanes[i];
    lane.path = paths[i];
    stats_.lanes.push_back(std::move(lane));
    ns_per_byte_.push_back(NsPerByte(paths[i], lane_links_[i], labels.links));
  }
  for (const LinkLabel& label : labels.links) {
    LinkStats link;
    link.name = label.name;
    link.bandwidth_bytes_per_s = label.bandwidth_bytes_per_s;
    stats_.links.push_back(std::move(link));
  }
  lane_busy_.resize(stats_.lanes.size());
  link_busy_.resize(stats_.links.size());
  if (options.live_kind.has_value()) Publish(*options.live_kind);
}

void Recorder::Publish(LivePage::Kind kind) {
  std::vector<LivePage::Row> rows;
  for (const LaneStats& lane : stats_.lanes) {
    rows.push_back({.name = lane.name,
                    .gpu = lane.path.gpu,
                    .relay = lane.path.relay,
                    .direction = lane.path.direction,
                    .bandwidth_bytes_per_s = lane.path.bandwidth_bytes_per_s});
  }
  for (const LinkStats& link : stats_.links) {
    rows.push_back({.name = link.name,
                    .is_link = true,
                    .bandwidth_bytes_per_s = link.bandwidth_bytes_per_s});
  }
  // Transfers do without: `doctor` says why.
  auto page = LivePage::Create(kind, rows);
  if (page.ok()) live_ = std::move(page).value();
}

void Recorder::OnSubmit() {
  const std::lock_guard lock(mutex_);
  ++stats_.num_submitted;
  ++stats_.num_in_flight;
  if (live_ != nullptr) live_->AddTransfers(1);
}

void Recorder::OnIssue(const sched::Block& block) {
  const std::lock_guard lock(mutex_);
  ++stats_.num_blocks_in_flight;
  stats_.lanes[block.lane].num_bytes_in_flight += block.size_bytes;
  if (live_ != nullptr) live_->AddBytes(block.lane, 0, 0, block.size_bytes);
}

void Recorder::OnBlockDone(const sched::Block& block, int64_t issued_ns,
                           const transport::BlockDone& done) {
  const std::lock_guard lock(mutex_);
  LaneStats& lane = stats_.lanes[block.lane];
  --stats_.num_blocks_in_flight;
  lane.num_bytes_in_flight -= block.size_bytes;
  if (done.status.ok()) {
    ++lane.num_blocks;
    lane.num_bytes += block.size_bytes;
    lane.queued_ns += std::max<int64_t>(done.start_ns - issued_ns, 0);
    // A lane that works on two blocks at once owes them one after the other.
    const int64_t turn_ns =
        std::max(done.start_ns, lane_busy_[block.lane].until_ns);
    if (static_cast<double>(done.end_ns - turn_ns) >
        late_factor_ * ExpectedNs(block.lane, block.size_bytes)) {
      ++lane.num_late_blocks;
    }
    AddToLinks(block, done);
  } else if (done.status.code() != StatusCode::kCancelled) {
    ++lane.num_failed_blocks;
    lane.reason = done.status.message();
  }
  if (live_ != nullptr) {
    live_->AddBytes(block.lane, done.status.ok() ? block.size_bytes : 0,
                    done.status.ok() ? 1 : 0, -block.size_bytes);
  }
  lane_busy_[block.lane].Add(done.start_ns, done.end_ns);
  lane.busy_ns = lane_busy_[block.lane].total_ns;
  AddToTrace({.transfer = block.transfer,
              .lane = block.lane,
              .gpu = lane.path.gpu,
              .direction = lane.path.direction,
              .offset_bytes = block.offset_bytes,
              .size_bytes = block.size_bytes,
              .issued_ns = issued_ns,
              .start_ns = done.start_ns,
              .relayed_ns = done.relayed_ns,
              .resumed_ns = done.resumed_ns,
              .end_ns = done.end_ns,
              .code = done.status.code()});
}

void Recorder::OnReissue() {
  const std::lock_guard lock(mutex_);
  ++stats_.num_reissued_blocks;
}

void Recorder::OnLaneRemoved(int lane, const Status& reason) {
  const std::lock_guard lock(mutex_);
  stats_.lanes[lane].is_removed = true;
  stats_.lanes[lane].reason = reason.message();
  if (live_ != nullptr) live_->SetStates(lane, LivePage::kDropped);
}

void Recorder::OnTransferDone(const TransferStats& transfer) {
  const std::lock_guard lock(mutex_);
  --stats_.num_in_flight;
  if (live_ != nullptr) live_->AddTransfers(-1, 1);
  if (transfer.status.ok()) {
    ++stats_.num_completed;
    stats_.num_completed_bytes += transfer.size_bytes;
  } else if (transfer.status.code() == StatusCode::kCancelled) {
    ++stats_.num_cancelled;
  } else {
    ++stats_.num_failed;
  }
  if (recent_.size() == kNumRecentTransfers) recent_.pop_front();
  recent_.push_back(transfer);
  AddToTrace({.transfer = transfer.id,
              .gpu = transfer.gpu,
              .direction = transfer.direction,
              .size_bytes = transfer.size_bytes,
              .issued_ns = transfer.submitted_ns,
              .start_ns = transfer.started_ns,
              .end_ns = transfer.ended_ns,
              .code = transfer.status.code()});
}

Stats Recorder::Get(int64_t now_ns) const {
  const std::lock_guard lock(mutex_);
  Stats stats = stats_;
  stats.now_ns = now_ns;
  stats.recent_transfers.assign(recent_.begin(), recent_.end());
  return stats;
}

std::vector<TraceEvent> Recorder::Trace() const {
  const std::lock_guard lock(mutex_);
  return {trace_.begin(), trace_.end()};
}

double Recorder::ExpectedNs(int lane, int64_t size_bytes) const {
  const topo::Path& path = stats_.lanes[lane].path;  // never changes
  return static_cast<double>(path.latency_ns) +
         static_cast<double>(size_bytes) * ns_per_byte_[lane];
}

void Recorder::Busy::Add(int64_t start_ns, int64_t end_ns) {
  total_ns += std::max<int64_t>(end_ns - std::max(start_ns, until_ns), 0);
  until_ns = std::max(until_ns, end_ns);
}

void Recorder::AddToLinks(const sched::Block& block,
                          const transport::BlockDone& done) {
  const auto& hops = lane_links_[block.lane];
  for (size_t hop = 0; hop < hops.size(); ++hop) {
    int64_t start_ns = done.start_ns;
    int64_t end_ns = done.end_ns;
    if (hops.size() == 2 && done.relayed_ns != 0) {
      if (hop == 0) end_ns = done.relayed_ns;
      if (hop == 1) start_ns = done.resumed_ns;
    }
    for (const int link : hops[hop]) {
      ++stats_.links[link].num_blocks;
      stats_.links[link].num_bytes += block.size_bytes;
      link_busy_[link].Add(start_ns, end_ns);
      stats_.links[link].busy_ns = link_busy_[link].total_ns;
      if (live_ != nullptr) {
        live_->AddBytes(stats_.lanes.size() + link, block.size_bytes, 1, 0);
      }
    }
  }
}

void Recorder::AddToTrace(const TraceEvent& event) {
  if (trace_capacity_ == 0) return;
  if (trace_.size() == trace_capacity_) trace_.pop_front();
  trace_.push_back(event);
}

}  // namespace turbobus::engine

// What other processes see of it: the part of StreamEngine that counts for
// `top`.

#include <string>
#include <utility>
#include <vector>

#include "engine/stream_engine.h"

namespace turbobus::engine {

using topo::Direction;

Status StreamEngine::Publish() {
  const std::lock_guard lock(mutex_);
  std::vector<LivePage::Row> rows;
  const auto name = [](int gpu, Direction direction) {
    return "gpu" + std::to_string(gpu) +
           (direction == Direction::kH2d ? " h2d" : " d2h");
  };
  for (const topo::Path& path : paths_) {
    LivePage::Row& row = rows.emplace_back();
    row.name = name(path.gpu, path.direction);
    if (path.is_relay()) row.name += " via gpu" + std::to_string(path.relay);
    row.gpu = path.gpu;
    row.relay = path.relay;
    row.direction = path.direction;
    row.bandwidth_bytes_per_s = path.bandwidth_bytes_per_s;
  }
  for (int gpu = 0; gpu < streams_->num_gpus(); ++gpu) {
    for (const Direction direction : {Direction::kH2d, Direction::kD2h}) {
      rows.push_back({.name = name(gpu, direction) + " on XLA's stream",
                      .gpu = gpu,
                      .direction = direction});
    }
  }
  TB_ASSIGN_OR_RETURN(live_, LivePage::Create(LivePage::Kind::kStreams, rows));
  live_->RemoveAtExit();
  for (size_t i = 0; i < paths_.size(); ++i) ShowState(static_cast<int>(i));
  return OkStatus();
}

void StreamEngine::CountPlain(int gpu, Direction direction, int64_t bytes) {
  if (const int path = PathIndex(gpu, topo::kNoRelay, direction); path >= 0) {
    ++stats_.paths[path].num_blocks;
    stats_.paths[path].size_bytes += bytes;
  }
  if (live_ == nullptr) return;
  live_->AddBytes(paths_.size() + 2 * static_cast<size_t>(gpu) +
                      static_cast<size_t>(direction),
                  bytes, 1, 0);
}

void StreamEngine::CountIssued(const Flight& flight) {
  if (live_ == nullptr) return;
  live_->AddTransfers(1);
  for (const LaneUse& use : flight.uses) {
    live_->AddBytes(use.path, 0, 0, use.bytes);
  }
}

void StreamEngine::CountOver(const Flight& flight) {
  if (live_ == nullptr) return;
  live_->AddTransfers(-1, 1);
  for (const LaneUse& use : flight.uses) {
    live_->AddBytes(use.path, use.bytes, use.num_blocks, -use.bytes);
    ShowState(use.path);
  }
}

void StreamEngine::ShowState(int path) {
  if (live_ == nullptr || !paths_[path].is_relay()) return;
  uint32_t states = 0;
  if (health_[path].is_backed_off() ||
      loans_[path].is_paused(streams_->NowNs())) {
    states |= LivePage::kBackedOff;
  }
  if (!stats_.paths[path].dropped.empty()) states |= LivePage::kDropped;
  if (rivals_[path].is_likely()) states |= LivePage::kHasRival;
  live_->SetStates(path, states);
}

}  // namespace turbobus::engine

#ifndef TURBOBUS_ENGINE_STATS_H_
#define TURBOBUS_ENGINE_STATS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "topo/path.h"

namespace turbobus::engine {

/// One direction of a link.
struct LinkLabel {
  std::string name;
  double bandwidth_bytes_per_s = 0;
};

/// What has crossed one direction of a link. Only blocks that arrived count.
struct LinkStats {
  std::string name;
  double bandwidth_bytes_per_s = 0;
  int64_t num_bytes = 0;
  int64_t num_blocks = 0;
  /// Time in which at least one block was on the link.
  int64_t busy_ns = 0;
};

struct LaneStats {
  std::string name;
  topo::Path path;
  int64_t num_bytes = 0;
  int64_t num_blocks = 0;
  int64_t busy_ns = 0;
  /// Between a block's issue and the lane's turning to it, added up.
  int64_t queued_ns = 0;
  /// Blocks that took more than `late_factor` times what the path should need.
  int64_t num_late_blocks = 0;
  int64_t num_failed_blocks = 0;
  int64_t num_bytes_in_flight = 0;
  bool is_removed = false;
  /// Of the last failure, or of the removal.
  std::string reason;
};

struct TransferStats {
  int64_t id = 0;
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  int64_t size_bytes = 0;
  Status status{};
  int64_t submitted_ns = 0;
  /// When the first lane turned to it; 0: none did.
  int64_t started_ns = 0;
  int64_t ended_ns = 0;
  int64_t num_blocks = 0;
  int64_t num_relayed_bytes = 0;
  int64_t num_reissued_blocks = 0;
  /// Why blocks had to be issued again; the last reason.
  std::string reissue_reason{};
};

struct Stats {
  int64_t now_ns = 0;
  int64_t created_ns = 0;
  int64_t num_submitted = 0;
  int64_t num_in_flight = 0;
  int64_t num_completed = 0;
  int64_t num_failed = 0;
  int64_t num_cancelled = 0;
  int64_t num_completed_bytes = 0;
  int64_t num_blocks_in_flight = 0;
  int64_t num_reissued_blocks = 0;
  std::vector<LaneStats> lanes;
  std::vector<LinkStats> links;
  /// The newest, oldest first.
  std::vector<TransferStats> recent_transfers;
};

/// A block on a lane, or (with `lane` -1) a whole transfer.
struct TraceEvent {
  int64_t transfer = 0;
  int lane = -1;
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
  /// Issued to the lane, or submitted.
  int64_t issued_ns = 0;
  int64_t start_ns = 0;
  /// As in `transport::BlockDone`.
  int64_t relayed_ns = 0;
  int64_t resumed_ns = 0;
  int64_t end_ns = 0;
  StatusCode code = StatusCode::kOk;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_STATS_H_

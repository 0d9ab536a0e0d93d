#ifndef TURBOBUS_ENGINE_FLIGHT_H_
#define TURBOBUS_ENGINE_FLIGHT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "topo/path.h"
#include "transport/streams.h"

namespace turbobus::engine {

/// A block that has been copied, for traces: when the lane had it in place.
struct BlockMark {
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
  transport::Event end = nullptr;
  /// When a relay had it, on its way on; null: no relay.
  transport::Event hop = nullptr;
};

/// What one transfer has on one path.
struct LaneUse {
  /// Index into the engine's paths.
  int path = 0;
  /// The GPU whose link the bytes cross: the relay, or the GPU itself.
  int link_gpu = 0;
  /// Tells lanes apart that share a link; null: XLA's own stream.
  const void* lane = nullptr;
  int64_t bytes = 0;
  int num_blocks = 0;
  /// Of a relay: blocks that may be on their way at once.
  int num_slots = 1;
  int64_t expected_ns = 0;
  /// Timed, on the link's GPU; `end` is also what the transfer waits for.
  transport::Event start = nullptr;
  transport::Event end = nullptr;
  /// No other transfer of ours was on the link: its time tells about strangers.
  bool is_clean = true;
  std::vector<BlockMark> marks;
};

/// A transfer whose copies have been issued but may not have happened.
///
/// Guarded by the engine's mutex, except while its handler issues it
/// (`!is_issued`) or waits for it (`num_holders` > 0): its events stay then.
struct Flight {
  int64_t id = 0;
  std::string_view call;
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  int64_t run = 0;
  /// XLA's stream, whose work so far the transfer waits for.
  transport::Stream stream = nullptr;
  transport::Event begin = nullptr;
  const std::byte* src = nullptr;
  std::byte* dst = nullptr;
  int64_t size_bytes = 0;
  std::vector<LaneUse> uses;

  int64_t submitted_ns = 0;
  /// That relays refused while it was issued, and the last one's reason.
  int num_reissued_blocks = 0;
  std::string reissue_reason;
  /// What it ended with.
  Status status;

  bool is_issued = false;
  int num_holders = 0;
  /// `stream` waits for it: what begins there later begins after it.
  bool is_joined = false;
  /// Its data is ready: it ends without anybody's help.
  bool has_begun = false;
  int64_t begun_ns = 0;
  bool is_finished = false;

  /// A fetched row that was guessed: on `Done` the device compares, and copies
  /// the right one if this was wrong.
  std::optional<transport::RowCopy> fix;

  /// Whether work that begins on `other` from now on may be queued behind this:
  /// it then waits for nothing that does not come by itself.
  bool MayBeFollowedOn(transport::Stream other) const {
    return is_finished || (is_issued && (stream == other || has_begun));
  }
  /// Whether work that begins on `other` from now on begins after this ends.
  bool EndsBefore(transport::Stream other) const {
    return is_finished || (is_joined && stream == other);
  }
};

using FlightPtr = std::shared_ptr<Flight>;

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_FLIGHT_H_

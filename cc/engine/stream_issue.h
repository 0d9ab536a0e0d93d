#ifndef TURBOBUS_ENGINE_STREAM_ISSUE_H_
#define TURBOBUS_ENGINE_STREAM_ISSUE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/flight.h"
#include "engine/stream_lanes.h"
#include "engine/stream_settings.h"
#include "transport/streams.h"

namespace turbobus::engine {

/// Lanes that a planned transfer holds. `flight->uses[0]` is the direct lane's,
/// `uses[i + 1]` that of `relays[i]`.
struct IssuePlan {
  struct Relay {
    std::vector<RelaySlot*> slots;
    int64_t bytes = 0;
    /// Fails as it is issued: for tests.
    bool has_fault = false;
  };

  FlightPtr flight;
  /// A lane's, or `flight->stream` itself.
  transport::Stream direct_stream = nullptr;
  /// Of the lane; lock-step transfers have one.
  transport::Event direct_round = nullptr;
  int64_t direct_bytes = 0;
  std::vector<Relay> relays;
  /// Of the direct lane; relays have no more than their slots hold.
  int64_t direct_block_bytes = 0;
  int64_t relay_block_bytes = 0;
  bool is_lock_step = false;
  /// Lock-step lanes have one a leg.
  RelayStreams relay_streams = RelayStreams::kPerLeg;
  /// A lane looks for others after this much; 0: never.
  int64_t yield_bytes = 0;
  /// Makes a timed event for a block's time on that GPU; empty: none wanted.
  std::function<StatusOr<transport::Event>(int gpu)> make_mark;
};

/// A relay that failed while its copies were issued, as an index into
/// `IssuePlan::relays`.
struct IssueFailure {
  size_t relay = 0;
  Status status;
  /// Went to the direct lane instead.
  int num_blocks = 0;
};

/// Issues all copies of a planned transfer: lanes take turns, so that none
/// starts late because another one is long. Blocks that a relay refuses go to
/// the direct lane and are returned in `failures`; an error means that the
/// direct lane refused one, and that the transfer is not complete. Either way
/// each use's `end` has been recorded behind what was issued on it.
///
/// Blocks only while a stream's queue is full; hold no lock.
Status Issue(transport::Streams& streams, IssuePlan& plan,
             std::vector<IssueFailure>& failures);

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_STREAM_ISSUE_H_

#ifndef TURBOBUS_ENGINE_STREAM_LANES_H_
#define TURBOBUS_ENGINE_STREAM_LANES_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/flight.h"
#include "topo/path.h"
#include "transport/streams.h"

namespace turbobus::engine {

/// A stream of a GPU's own for its direct copies in one direction.
struct DirectLane {
  transport::Stream stream = nullptr;
  transport::Event round = nullptr;
  int queued_blocks = 0;
  FlightPtr user;
};

/// One block of memory on a GPU that lends its link, and streams. A transfer
/// that has both slots of a direction alternates between the buffers; its legs
/// are on the first slot's two streams, or each block is on its own slot's
/// `pcie` (RelayStreams).
struct RelaySlot {
  void* buffer = nullptr;
  transport::Stream pcie = nullptr;
  transport::Stream fabric = nullptr;
  /// The slot has been filled (or: its block has crossed PCIe); has been
  /// emptied; has ended a round.
  transport::Event full = nullptr;
  transport::Event free = nullptr;
  transport::Event round = nullptr;
  bool was_used = false;
  int queued_blocks = 0;
  FlightPtr user;
};

/// A stream on a relay for kernels that copy rows.
struct RowLane {
  transport::Stream stream = nullptr;
  FlightPtr user;
};

/// All lanes of one GPU as a lender.
struct Lender {
  std::array<std::array<RelaySlot, 2>, 2> slots;  // [direction][slot]
  std::array<RowLane, 2> rows;                    // [direction]
  /// Who borrowed each direction last, and when another GPU did before.
  std::array<int, 2> borrower = {-1, -1};
  std::array<int64_t, 2> rival_id = {INT64_MIN, INT64_MIN};
};

/// Streams, events and staging memory of every lane, made once.
///
/// Not thread-safe: the engine's mutex guards it. `Create` may wait for the
/// device.
class StreamLanes {
 public:
  static constexpr int kDirectLanes = 4;
  static constexpr int kMaxQueuedBlocks = 400;
  /// For this many transfers after another GPU has borrowed from a lender, each
  /// borrower gets one slot only.
  static constexpr int64_t kRivalTransfers = 16;

  /// Lanes for `paths`. A relay that cannot be set up is left out, and why is
  /// said in `dropped` at the path's index; a GPU without direct lanes is an
  /// error.
  static StatusOr<StreamLanes> Create(transport::Streams& streams,
                                      const std::vector<topo::Path>& paths,
                                      int64_t slot_bytes,
                                      std::vector<std::string>& dropped);

  /// The best stream for a transfer that begins on `stream` now, or null if
  /// none can be had without waiting for others.
  DirectLane* PickDirect(int gpu, topo::Direction direction,
                         transport::Stream stream);

  /// Slots of `relay` for a transfer of `gpu` that begins on `stream` now: two,
  /// one or none.
  std::vector<RelaySlot*> PickSlots(int relay, int gpu,
                                    topo::Direction direction,
                                    transport::Stream stream, int64_t transfer);
  RowLane* PickRows(int relay, topo::Direction direction,
                    transport::Stream stream);

  int64_t slot_bytes() const { return slot_bytes_; }
  /// Memory of each GPU that lends its link.
  const std::map<int, int64_t>& staging_bytes() const { return staging_bytes_; }

 private:
  static Status CreateLender(transport::Streams& streams, int gpu,
                             int64_t slot_bytes, Lender& lender);

  int64_t slot_bytes_ = 0;
  std::map<int, int64_t> staging_bytes_;
  std::map<std::pair<int, int>, std::array<DirectLane, kDirectLanes>> direct_;
  std::map<int, Lender> lenders_;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_STREAM_LANES_H_

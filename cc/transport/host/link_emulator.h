#ifndef TURBOBUS_TRANSPORT_HOST_LINK_EMULATOR_H_
#define TURBOBUS_TRANSPORT_HOST_LINK_EMULATOR_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/host/flow_model.h"
#include "transport/host/link_model.h"
#include "transport/transport.h"

namespace turbobus::transport::host {

/// When blocks move over a `LinkModel`, and through which staging buffer.
///
/// A lane does its blocks in order, as a stream does. A hop of a block ends
/// when its bytes have streamed over the hop's links *and* the driver has
/// really moved them, so a machine too slow for the emulated rates shows longer
/// times, never bytes that are not there. The next block starts at the instant
/// at which the one before ended, however late the driver looks: delays of the
/// driver do not add up.
///
/// Pure: time is what the driver says (never decreasing). Not thread-safe.
class LinkEmulator {
 public:
  /// `model` must be valid.
  explicit LinkEmulator(LinkModel model);

  /// Queues a block on its lane. UNAVAILABLE if the lane is gone,
  /// ALREADY_EXISTS for an id in flight.
  Status Issue(uint64_t id, int lane, int64_t size_bytes, int64_t now_ns);

  /// The bytes of the copy that `TakeCopies` returned for this block are there.
  void CopyDone(uint64_t id, int64_t now_ns);

  /// Ends a block with `reason` as soon as no copy of it is under way.
  void Abort(uint64_t id, const Status& reason, int64_t now_ns);

  /// The lane is gone: its blocks end with UNAVAILABLE, and so does `Issue`.
  void RemoveLane(int lane, const Status& reason, int64_t now_ns);

  /// The lane's hops take `factor` times as long as their links allow alone.
  void SlowLane(int lane, double factor, int64_t now_ns);

  /// Lets time pass.
  void Advance(int64_t now_ns);

  /// When something happens next if no call comes before.
  std::optional<int64_t> NextEventNs() const;

  /// One hop of a block to be copied now.
  struct Copy {
    uint64_t id = 0;
    int lane = 0;
    int hop = 0;
    /// The staging buffer of the lane's ring; -1 on lanes of one hop.
    int slot = -1;
  };
  /// Copies that became due since the last call, in order.
  std::vector<Copy> TakeCopies() { return std::exchange(copies_, {}); }

  /// Blocks that ended since the last call, in order.
  std::vector<BlockDone> TakeDone() { return std::exchange(done_, {}); }

  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  const LinkModel& model() const { return model_; }

  /// Hops that ended late because the bytes had not been moved in time.
  int64_t num_late_copies() const { return num_late_copies_; }

 private:
  struct Block {
    int lane = 0;
    int64_t size_bytes = 0;
    int hop = 0;
    int slot = -1;
    bool is_active = false;         // its hop has started
    bool is_copying = false;        // the driver has not said CopyDone yet
    bool has_streamed = false;      // its flow has ended
    std::optional<FlowId> flow{};   // none while latency passes
    std::optional<Status> abort{};  // ends once it is not copying
    BlockDone done{};
  };
  struct Lane {
    std::deque<uint64_t> queue[2];  // by hop
    int num_active[2] = {0, 0};
    int num_slots_held = 0;
    double slow_factor = 1;
    bool is_waiting_for_slot = false;
    std::optional<Status> removed;
  };
  struct Staging {
    std::vector<int> free_slots;
    std::deque<int> waiting_lanes;  // oldest first
  };

  void StartWaiting(int lane, int hop);
  bool TakeSlot(int lane, Block& block);
  void ReleaseSlot(Block& block);
  void StartHop(uint64_t id, Block& block);
  void StartFlow(uint64_t id, Block& block);
  void StopFlow(Block& block);
  void MaybeEndHop(uint64_t id);
  void EndBlock(uint64_t id, Status status);
  double MaxRate(const Block& block) const;

  const LinkModel model_;
  FlowModel flows_;
  std::map<uint64_t, Block> blocks_;
  std::map<FlowId, uint64_t> block_of_flow_;
  std::set<std::pair<int64_t, uint64_t>> latencies_;  // (when over, block)
  std::vector<Lane> lanes_;
  std::vector<Staging> stagings_;
  std::vector<Copy> copies_;
  std::vector<BlockDone> done_;
  int64_t now_ns_ = 0;
  int64_t num_late_copies_ = 0;
};

}  // namespace turbobus::transport::host

#endif  // TURBOBUS_TRANSPORT_HOST_LINK_EMULATOR_H_

#ifndef TURBOBUS_SCHED_SCHEDULER_H_
#define TURBOBUS_SCHED_SCHEDULER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "topo/path.h"

namespace turbobus::sched {

using TransferId = int64_t;
using BlockId = int64_t;

enum class Mode : uint8_t {
  /// Every lane takes its next block as soon as its window has room.
  kFreeRunning = 0,
  /// The paper's slots: one block a lane, then all lanes synchronise.
  kLockStep = 1,
};

struct LaneSpec {
  topo::Path path;
  /// Bytes the lane allows in flight.
  int64_t window_bytes = 32 << 20;
  /// Caps (indices into `Config::caps`) that this lane draws on.
  std::vector<int> caps;
};

/// A slow resource that several lanes share: a link group, a NUMA node's memory.
struct CapSpec {
  std::string name;
  double bandwidth_bytes_per_s = 0;
};

struct Config {
  std::vector<LaneSpec> lanes;
  std::vector<CapSpec> caps;
  Mode mode = Mode::kFreeRunning;
  int64_t block_bytes = 16 << 20;
  /// What a large transfer may have queued on relays at once.
  int64_t chunk_bytes = 128 << 20;
  /// A lane whose blocks take more than this times their expected time backs off.
  double late_factor = 1.25;
};

struct Transfer {
  TransferId id = 0;
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  int64_t size_bytes = 0;
  int numa_node = 0;
};

struct Block {
  BlockId id = 0;
  TransferId transfer = 0;
  int lane = 0;
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
};

/// A transfer that has nothing left to copy.
struct Finished {
  TransferId transfer = 0;
  /// Cancelled transfers finish once their last block in flight has ended.
  bool is_cancelled = false;
};

/// Decides which block of which transfer each lane copies next (PAPERS,
/// TurboBus, "Executor" and "Scheduler"; terms as in docs/scheduler.md).
///
/// A pure state machine: events in, blocks out. It reads no clock (`now_ns` is
/// whatever its driver says, never decreasing), owns no thread, touches no
/// bytes. Not thread-safe: one driver calls it.
class Scheduler {
 public:
  /// Fails with INVALID_ARGUMENT, naming the field, on a config that cannot
  /// work: no lanes, a lane with no rate, an unknown cap, a negative size.
  static StatusOr<std::unique_ptr<Scheduler>> Create(Config config);

  virtual ~Scheduler() = default;

  /// The data of `transfer` is ready: it arrives now. INVALID_ARGUMENT for an
  /// id in use, a negative size or a GPU and direction without a direct lane.
  /// A transfer of no bytes finishes at once (see `TakeFinished`).
  virtual Status Submit(const Transfer& transfer, int64_t now_ns) = 0;

  /// The next block to issue; the driver calls until there is none.
  virtual std::optional<Block> Next(int64_t now_ns) = 0;

  /// `block` has been copied. NOT_FOUND if it is not in flight.
  virtual Status Complete(BlockId block, int64_t now_ns) = 0;

  /// `block` could not be copied: its bytes are queued again, on other lanes if
  /// there are any. NOT_FOUND if it is not in flight.
  virtual Status Fail(BlockId block, int64_t now_ns) = 0;

  /// Issues no further block of `transfer`. NOT_FOUND if it is unknown.
  virtual Status Cancel(TransferId transfer, int64_t now_ns) = 0;

  /// The lane is gone; its blocks in flight are queued again and must no longer
  /// be completed. A GPU's last lane of a direction can go too: its transfers
  /// are then returned by `TakeStranded`.
  virtual Status RemoveLane(int lane, int64_t now_ns) = 0;

  /// Transfers finished since the last call, in order.
  virtual std::vector<Finished> TakeFinished() = 0;
  /// Transfers that no remaining lane can serve, since the last call.
  virtual std::vector<TransferId> TakeStranded() = 0;

  /// When to call `Next` again although nothing has happened (a lane that
  /// backed off is due a probe), or none.
  virtual std::optional<int64_t> NextWakeupNs() const = 0;

  virtual bool is_idle() const = 0;
};

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_SCHEDULER_H_

#ifndef TURBOBUS_ENGINE_STREAM_SETTINGS_H_
#define TURBOBUS_ENGINE_STREAM_SETTINGS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "topo/path.h"

namespace turbobus::engine {

enum class SplitPolicy : uint8_t {
  /// All lanes are expected to finish together (sched/split.h).
  kFinishTime = 0,
  /// Equal shares, whatever the lanes are doing: for comparison.
  kEven = 1,
  /// The direct lane only.
  kDirect = 2,
};

/// Which streams a relay's two legs run on.
enum class RelayStreams : uint8_t {
  /// One a leg; events say when a slot is full and when it is free.
  kPerLeg = 0,
  /// One a slot, which carries both legs of a block. Blocks cross PCIe one
  /// after the other, because each waits for the one before on the other
  /// slot's stream: that wait is also what lets others in between.
  kPerSlot = 1,
  /// As kPerSlot, but the two streams do not wait for each other.
  kPerSlotLoose = 2,
};

struct StreamSettings {
  int64_t block_bytes = 16 << 20;
  /// Smaller transfers are one copy on XLA's own stream.
  int64_t min_pooled_bytes = 6 << 20;
  SplitPolicy split = SplitPolicy::kFinishTime;
  /// The paper's slots: one block a lane, then all lanes wait for each other.
  bool is_lock_step = false;
  bool has_yields = true;
  RelayStreams relay_streams = RelayStreams::kPerSlot;
  /// A relay that takes longer than this times what was expected is planned
  /// with at the rate that it showed, until it is on time again.
  double late_factor = 1.25;
  int64_t direct_latency_ns = 4'000;
  int64_t relay_latency_ns = 40'000;
  /// Every transfer is one copy: on XLA's own stream, or beside it on the GPU's
  /// own link if it was started.
  bool is_disabled = false;
  /// Keeps the time of every block.
  bool is_traced = false;
};

/// INVALID_ARGUMENT, naming the setting, if it cannot work.
Status Validate(const StreamSettings& settings);

/// INVALID_ARGUMENT if it is not positive.
Status CheckRate(double bandwidth_bytes_per_s);

/// Of transfers that are over, and on the direct path plain copies, which count
/// when they are enqueued.
struct PathStats {
  topo::Path path;
  int64_t num_transfers = 0;
  int64_t num_blocks = 0;
  int64_t size_bytes = 0;
  /// From the start of a transfer's first block to the end of its last one.
  int64_t busy_ns = 0;
  int64_t num_late = 0;
  /// Blocks that a relay refused, and transfers that the own link did.
  int64_t num_failed = 0;
  /// Issued and not over.
  int64_t bytes_in_flight = 0;
  /// Of its rate, what strangers leave of it.
  double share = 1;
  /// Gets a probe at most: strangers keep it busy, or it has cost more than it
  /// gained.
  bool is_backed_off = false;
  /// The lender is busy itself whenever this GPU is.
  bool has_rival = false;
  /// Why it is not used any more; empty while it is.
  std::string dropped;
  /// Why the latest transfer that could have used it did without; empty if it
  /// had no such reason.
  std::string left_out;
};

struct StreamStats {
  std::vector<PathStats> paths;
  int64_t now_ns = 0;
  int64_t created_ns = 0;
  /// Over streams of our own; those on XLA's are counted as plain.
  int64_t num_completed = 0;
  int64_t completed_bytes = 0;
  int64_t num_failed = 0;
  int64_t num_reissued_blocks = 0;
  int64_t num_blocks_in_flight = 0;
  int64_t num_pooled = 0;
  int64_t num_direct = 0;
  /// Copies on XLA's own stream.
  int64_t num_plain = 0;
  int64_t plain_bytes = 0;
  int64_t num_rows_by_cores = 0;
  int64_t num_rows_guessed = 0;
  int64_t num_guesses_right = 0;
  int64_t num_guesses_wrong = 0;
  /// Stacks whose next row is guessed.
  int64_t num_guessed_stacks = 0;
  int64_t num_in_flight = 0;
  /// Neither done nor left by their runs.
  int64_t num_started = 0;
  /// Of each GPU that lends its link: allocated once.
  std::map<int, int64_t> staging_bytes;
  int64_t num_events = 0;
  /// Host time of the latest calls that issued copies.
  std::vector<int64_t> handler_ns;
};

/// A transfer that is over.
struct TransferRecord {
  int64_t id = 0;
  std::string call;
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  int64_t size_bytes = 0;
  int64_t relayed_bytes = 0;
  int num_blocks = 0;
  int num_reissued_blocks = 0;
  std::string reissue_reason;
  Status status;
  int64_t submitted_ns = 0;
  int64_t started_ns = 0;
  int64_t ended_ns = 0;
};

/// A block on a lane, or a lane's part of a transfer where blocks were not
/// timed.
struct StreamSpan {
  int path = 0;
  int64_t transfer = 0;
  std::string call{};
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
  int64_t issued_ns = 0;
  int64_t start_ns = 0;
  /// On a relay: when the first hop was over, and when the second one began; 0:
  /// there is one hop, or nobody knows.
  int64_t relayed_ns = 0;
  int64_t resumed_ns = 0;
  int64_t end_ns = 0;
  StatusCode code = StatusCode::kOk;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_STREAM_SETTINGS_H_

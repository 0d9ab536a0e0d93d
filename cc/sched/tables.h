#ifndef TURBOBUS_SCHED_TABLES_H_
#define TURBOBUS_SCHED_TABLES_H_

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "sched/backlog.h"
#include "sched/bit_set.h"
#include "sched/index_list.h"
#include "sched/late_detector.h"
#include "sched/scheduler.h"

namespace turbobus::sched {

inline constexpr int kNone = -1;

/// Blocks are cut for relays slower than the direct lane, so that they take no
/// longer there: what has been issued cannot be taken back when others come to
/// use the link. Cuts are multiples of this part of a block; a relay that is
/// too slow for one part is not used.
inline constexpr int kBlockParts = 16;

/// Bytes that were issued once and have to be issued again.
struct Extent {
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
  /// The lane on which they failed, or `kNone`.
  int failed_lane = kNone;
  int num_failures = 0;
};

/// A transfer from its arrival to its last byte.
struct TransferState {
  TransferId id = 0;
  int queue = kNone;
  int64_t size_bytes = 0;
  int64_t block_bytes = 0;
  /// Everything from here on has never been issued.
  int64_t next_offset_bytes = 0;
  std::vector<Extent> returned;
  /// Not issued: the rest behind `next_offset_bytes`, and what was returned.
  int64_t left_bytes = 0;
  /// Of these, what stands in the queue now.
  int64_t chunk_left_bytes = 0;
  /// Order in which chunks entered their queues, over all queues.
  uint64_t sequence = 0;
  int num_in_flight = 0;
  bool is_small = false;
  bool is_large = false;
  bool is_cancelled = false;
  ListHook queued;
  ListHook relayable;
  ListHook token;
};

using Transfers = std::vector<TransferState>;

/// A link, link group or memory that several lanes draw on.
struct Cap {
  int64_t bandwidth_bytes_per_s = 0;
  /// Of the direct lanes that have something to issue, which come first: what
  /// they would carry by themselves, and what all their caps let them.
  int64_t asked_rate = 0;
  int64_t own_rate = 0;
  /// Of the lanes with blocks in flight: all of them, and the relays.
  int64_t active_rate = 0;
  int64_t relay_rate = 0;
  /// When relays will have used up what they have been given so far.
  int64_t relay_free_ns = 0;

  /// What direct lanes leave to relays.
  int64_t residual() const { return bandwidth_bytes_per_s - own_rate; }
};

struct Lane {
  int queue = kNone;
  /// The link whose GPU it belongs to: the relay's, or the GPU's own.
  int host_link = kNone;
  bool is_relay = false;
  bool is_removed = false;
  double ns_per_byte = 0;
  int64_t rate_bytes_per_s = 0;
  int64_t latency_ns = 0;
  int64_t window_bytes = 0;
  /// What it copies of a block, where it is much slower than the direct lane.
  double block_part = 1;
  std::vector<int> caps;
  /// Whether it counts in `HostLink::num_sharing`.
  bool is_sharing = false;

  Backlog backlog;
  LateDetector late;
  int64_t in_flight_bytes = 0;
  int num_in_flight = 0;
  int64_t num_issued_blocks = 0;
  int64_t issued_bytes = 0;

  /// How long the lane needs for so much, at the speed it has shown lately,
  /// if what it shares slows it down by the factor `stretch`.
  int64_t ServiceNs(int64_t size_bytes, double stretch) const {
    return static_cast<int64_t>(static_cast<double>(size_bytes) * ns_per_byte *
                                late.lateness() * stretch);
  }

  /// What a block issued now takes beyond its service: nothing if it follows
  /// another, whose last byte is still on its way when its own first leaves.
  int64_t NextLatencyNs() const { return num_in_flight == 0 ? latency_ns : 0; }
};

/// The transfers of one GPU, direction and NUMA node, and the lanes for them.
struct Queue {
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  int numa_node = 0;
  int host_link = kNone;
  /// The direct lane; `kNone` once it has been removed.
  int direct = kNone;
  /// Whether the config gave it one.
  bool has_direct = false;
  std::vector<int> relays;
  BitSet relay_links;
  int64_t total_rate_bytes_per_s = 0;

  /// Chunks, first come, first served.
  IndexList<TransferState, &TransferState::queued> queued;
  /// Those of them that relays may work for, in the same order.
  IndexList<TransferState, &TransferState::relayable> relayable;
  int64_t queued_bytes = 0;
  /// Whether this queue counts in `HostLink::num_own_waiting`.
  bool is_waiting = false;
  /// Lanes that left work to others because those would finish it first: to be
  /// asked again whenever anything of this queue moves.
  bool has_deferred = false;
  bool is_direct_deferred = false;
  BitSet deferred_links;

  bool is_orphan() const { return direct == kNone; }
};

/// One GPU's own link to the host in one direction: its direct lanes run on it,
/// and the relay lanes for which the GPU lends it.
struct HostLink {
  std::vector<int> queues;
  std::vector<int> borrowers;
  /// Of the fastest lane that uses it: a block that is slow for other reasons
  /// takes no more of the link than its bytes.
  double ns_per_byte = 0;
  Backlog backlog;
  /// Borrowers with blocks in flight, and with those or something to copy.
  int num_borrowing = 0;
  int num_sharing = 0;
  /// The relay's staging, shared by the borrowers.
  int64_t relay_window_bytes = 0;
  int64_t relay_in_flight_bytes = 0;
  /// Queues with a direct lane and something to issue.
  int num_own_waiting = 0;
  /// Blocks of direct lanes in flight.
  int num_own_in_flight = 0;
  /// Large transfers of this GPU with bytes to issue; the first has the token.
  IndexList<TransferState, &TransferState::token> token;
  /// Lock-step: the last slot in which the link got a block.
  int64_t slot = -1;

  /// Whether its own GPU needs it: then it is not lent.
  bool is_needed() const { return num_own_waiting + num_own_in_flight > 0; }

  int64_t ServiceNs(int64_t size_bytes) const {
    return static_cast<int64_t>(static_cast<double>(size_bytes) * ns_per_byte);
  }
};

/// Everything that the scheduler knows; the rules in finish_time.h read it.
struct Tables {
  Config config;
  std::vector<Lane> lanes;
  std::vector<Queue> queues;
  std::vector<HostLink> links;
  std::vector<Cap> caps;
  Transfers transfers;

  /// INVALID_ARGUMENT, naming the field, on a config that cannot work.
  static StatusOr<Tables> Create(Config config);

  /// The queue for a transfer, or `kNone` if its GPU has no direct lane in that
  /// direction in the config.
  int FindQueue(int gpu, topo::Direction direction, int numa_node) const;
};

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_TABLES_H_

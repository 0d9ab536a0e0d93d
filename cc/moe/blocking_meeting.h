#ifndef TURBOBUS_MOE_BLOCKING_MEETING_H_
#define TURBOBUS_MOE_BLOCKING_MEETING_H_

#include <atomic>
#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace turbobus::moe {

/// Which call of which run, for the ranks of one group. On GPUs every device
/// issues the calls of a program in the same order, so the position in the run
/// tells calls apart.
struct CallKey {
  int64_t run_id = 0;
  int64_t position = 0;
  /// The number of the group among those that make the call.
  int64_t group = 0;

  friend auto operator<=>(const CallKey&, const CallKey&) = default;
};

/// Where the host threads of a call's ranks wait for each other. A call meets
/// several times, each time to swap records: what is only true once every rank
/// has got somewhere (pointers, events recorded).
///
/// Thread-safe. `Meet` blocks its caller, for `timeout` at most; it spins for a
/// moment first, since the ranks of a call tend to come within microseconds.
class BlockingMeeting {
 public:
  /// What a rank tells the others: small values, meaningful to the caller, and
  /// what must live until the last rank has let go of the records.
  struct Record {
    std::vector<uint64_t> values;
    std::shared_ptr<void> keep;
  };
  using Records = std::shared_ptr<const std::vector<Record>>;

  struct Rank {
    std::string_view op;  // As in "dispatch over axis 'expert'".
    int rank = 0;
    int num_ranks = 1;
  };

  explicit BlockingMeeting(std::chrono::milliseconds timeout)
      : timeout_(timeout) {}
  BlockingMeeting(const BlockingMeeting&) = delete;
  BlockingMeeting& operator=(const BlockingMeeting&) = delete;

  /// The one that GPU handlers use; 60 s unless `set_timeout` says otherwise.
  static BlockingMeeting& Process();

  void set_timeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds timeout() const;

  /// The position in its run of the call that `device` makes now: 0, 1, 2, …
  int64_t NextPosition(int64_t run_id, int device);

  /// Waits for all ranks of meeting number `phase` of `key`; returns their
  /// records by rank. If one does not come in time, or `Fail`s, every rank of
  /// the call gets the same error, now and in later phases. INTERNAL if a rank
  /// comes twice or the ranks disagree on their number.
  StatusOr<Records> Meet(const CallKey& key, int phase, const Rank& who,
                         Record record);

  /// Tells the others of `key` that this rank cannot go on.
  void Fail(const CallKey& key, const Rank& who, const Status& reason);

  /// The error that `key` has failed with, if it has: for a rank that waits for
  /// something else than its peers.
  Status Failure(const CallKey& key) const;

  /// Meetings that some rank waits in.
  int64_t num_open() const;

 private:
  struct Phase {
    std::string op;
    int num_present = 0;
    std::vector<bool> is_present;
    std::vector<Record> records;
    Status status;
    /// Set last, once: `records` or `status` may be read without the lock.
    std::atomic<bool> is_over = false;
  };
  struct Run {
    int64_t next_position = 0;
    uint64_t last_use = 0;
  };

  /// Under the lock: `phase` has failed for good, with all that is to come of
  /// its call.
  void FailLocked(const CallKey& key, Phase& phase, Status status);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // All guarded by `mutex_`.
  std::chrono::milliseconds timeout_;
  std::map<std::pair<CallKey, int>, std::shared_ptr<Phase>> open_;
  std::map<CallKey, Status> failed_;
  std::deque<CallKey> failed_order_;  // Oldest first.
  std::map<std::pair<int64_t, int>, Run> runs_;
  uint64_t num_uses_ = 0;
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_BLOCKING_MEETING_H_

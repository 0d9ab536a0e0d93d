#ifndef TURBOBUS_MOE_RENDEZVOUS_H_
#define TURBOBUS_MOE_RENDEZVOUS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "moe/threads.h"

namespace turbobus::moe {

/// What one rank brings to an exchange. Each op derives its own record from it:
/// shapes, and pointers to operands and results that stay valid until `Done`.
class Member {
 public:
  virtual ~Member() = default;

  /// Called exactly once, on a thread that no other member's `Done` runs on:
  /// this rank's results are complete and nobody reads its operands any more,
  /// or the exchange failed. May block and may run anything (XLA continues the
  /// program inside it).
  virtual void Done(const Status& status) = 0;
};

/// The members of a call, by rank.
using Members = std::span<const std::unique_ptr<Member>>;

/// An exchange whose ranks are all there, cut into pieces.
class Work {
 public:
  virtual ~Work() = default;
  virtual int64_t num_pieces() const = 0;

  /// Called once for each piece in [0, num_pieces()), from any thread, several
  /// at a time, in any order (a rank's thread starts at its share of them).
  /// Must not block.
  virtual void Run(int64_t piece) = 0;

  /// Called once, after all pieces and before any member's `Done`.
  virtual void Finish() {}
};

/// Makes the work from the ranks' records. Runs once, on the thread of the last
/// to arrive, so it should be short; an error goes to all ranks.
using MakeWork = StatusOr<std::unique_ptr<Work>> (*)(Members members);

/// Where a rank goes, and what it says about itself in messages.
struct Meeting {
  uint64_t key = 0;  // The same on all ranks of the call, unlike any other.
  std::string op;    // As in "dispatch over axis 'expert'".
  int rank = 0;      // In [0, num_ranks).
  int num_ranks = 1;
  int64_t size_bytes = 0;  // What the others await from a rank.
};

/// Where the ranks of a call meet, whatever order they come in; then they
/// exchange, and each is told on a thread of its own.
///
/// A rank that comes again under a key whose exchange has not begun opens the
/// next meeting of that key: ranks are matched first with first. A call of
/// which a rank is missing `timeout` after the first one came fails on all that
/// are there; those that come later get the same error at once.
///
/// Thread-safe. `Arrive` never waits for another rank: an FFI handler calls it
/// and returns its future.
class Rendezvous {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Rendezvous(std::chrono::milliseconds timeout,
                      Threads& threads = Threads::Process());
  /// Cancels those who wait; begun exchanges must be over.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// The one that FFI handlers use; 60 s unless `set_timeout` says otherwise.
  static Rendezvous& Process();

  /// A key that no other call of this process has.
  static uint64_t NewKey();

  /// A number that tells this process from others.
  static uint64_t ProcessTag();

  /// Takes `member` to its meeting; its `Done` will be called, whatever
  /// happens. All ranks of a call pass the same `make_work`.
  void Arrive(const Meeting& meeting, std::unique_ptr<Member> member,
              MakeWork make_work);

  /// Applies to meetings that open from now on. Positive.
  void set_timeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds timeout() const;

  /// Fails every meeting that should have begun before `now`. The watcher calls
  /// it when the time has come; tests call it to move time.
  void Expire(Clock::time_point now);

  /// Meetings that some rank waits in.
  int64_t num_open() const;

 private:
  struct Open {
    std::string op;
    int64_t size_bytes = 0;
    Clock::time_point deadline;
    std::chrono::milliseconds timeout{0};
    std::vector<std::unique_ptr<Member>> members;
    int num_present = 0;
  };
  struct Failed {
    Status status;
    std::vector<bool> has_come;
    int num_missing = 0;
  };
  using Queue = std::deque<std::unique_ptr<Open>>;

  /// Under the lock. Takes `member` unless it returns an error; `complete` is
  /// the meeting, if this rank was the last.
  Status Join(const Meeting& meeting, std::unique_ptr<Member>& member,
              std::unique_ptr<Open>& complete);
  std::unique_ptr<Open> NewMeeting(const Meeting& meeting);
  void Remember(uint64_t key, const Open& open, const Status& status);
  void Watch();

  void Begin(Open& open, MakeWork make_work);
  void Fail(std::vector<std::unique_ptr<Member>> members, const Status& status);

  Threads& threads_;
  mutable std::mutex mutex_;
  std::condition_variable wake_watcher_;
  std::condition_variable watcher_ended_;
  // All guarded by `mutex_`.
  std::chrono::milliseconds timeout_;
  std::unordered_map<uint64_t, Queue> open_;
  std::unordered_map<uint64_t, Failed> failed_;
  std::deque<uint64_t> failed_order_;
  bool is_watched_ = false;
  Clock::time_point watched_until_;  // When the watcher looks again by itself.
  bool is_closing_ = false;
};

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_RENDEZVOUS_H_

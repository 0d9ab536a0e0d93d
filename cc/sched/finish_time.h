#ifndef TURBOBUS_SCHED_FINISH_TIME_H_
#define TURBOBUS_SCHED_FINISH_TIME_H_

#include <cstdint>
#include <limits>

#include "sched/tables.h"

namespace turbobus::sched {

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

/// Counts `own_rate` anew: after a change in which direct lanes have something
/// to issue. A link that is full with both directions leaves more of the memory
/// to others than two links would.
void CountOwnRates(Tables& tables);

/// When caps let the relay `lane` have a block of `size_bytes` (`now_ns` or
/// earlier: now), or `kNever`: not while direct lanes keep a cap full.
///
/// A cap gives relays what direct lanes with work leave of it, as a clock that
/// runs ahead with every relayed byte (5 % slower than that: profiled rates are
/// not exact, and a cap that idles is lost). A lane's own window does not count
/// against it, and where the relays at work fit into the cap together the clock
/// does not matter.
int64_t CapsOpenNs(const Tables& tables, const Lane& lane, int64_t size_bytes,
                   int64_t now_ns);

/// Moves those clocks on by a block that `lane` relays.
void ChargeCaps(Tables& tables, const Lane& lane, int64_t size_bytes,
                int64_t now_ns);

/// The part of a block that caps leave to the relay `lane` in a slot that it
/// shares with the lanes that have blocks already, at most 1.
double CapShare(const Tables& tables, const Lane& lane);

/// How much longer than alone a block on `lane` takes because its caps are
/// shared with the other lanes at work; at least 1.
double CapStretch(const Tables& tables, const Lane& lane);

/// The same, and because other borrowers are using the relay's link.
double Stretch(const Tables& tables, const Lane& lane);

/// When a block issued now on `lane` would begin to move: behind what is in
/// flight on the lane and on the link it uses, its own GPU's traffic included.
int64_t StartNs(const Tables& tables, const Lane& lane, int64_t now_ns);

/// When a block of `size_bytes` issued now on `lane` would have arrived.
int64_t FinishNs(const Tables& tables, const Lane& lane, int64_t size_bytes,
                 int64_t now_ns);

/// Whether a relayed block of `transfer` that ends at `finish_ns` ends sooner
/// than the direct lane would be through with it: with what is in flight there,
/// with the chunks queued ahead, and with the rest of the transfer, whose last
/// block this may as well be. The rule that makes pooling never lose.
bool FinishesBeforeDirect(const Tables& tables, const TransferState& transfer,
                          int64_t finish_ns, int64_t now_ns);

/// Whether the queue's other lanes would be through with the rest of `transfer`
/// before `finish_ns`, so that `lane` had better leave the block of
/// `size_bytes` to them: a slow relay near the end, a lane that would only
/// queue it.
bool OthersFinishBefore(const Tables& tables, const TransferState& transfer,
                        int lane, int64_t size_bytes, int64_t finish_ns,
                        int64_t now_ns);

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_FINISH_TIME_H_

#ifndef TURBOBUS_SCHED_REPLAY_H_
#define TURBOBUS_SCHED_REPLAY_H_

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "sched/scheduler.h"

namespace turbobus::sched {

struct ReplayResult {
  int64_t num_blocks = 0;
  /// Virtual time at the last completion.
  int64_t end_ns = 0;
};

/// Runs a workload through a scheduler in virtual time, as fast as it will go:
/// what a driver does, with nothing around it, to measure what decisions cost.
/// Lanes serve one block after the other at their own rate. `num_concurrent`
/// of the transfers are kept waiting or in flight until all have been
/// submitted.
StatusOr<ReplayResult> Replay(const Config& config,
                              const std::vector<Transfer>& transfers,
                              int num_concurrent);

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_REPLAY_H_

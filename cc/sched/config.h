#ifndef TURBOBUS_SCHED_CONFIG_H_
#define TURBOBUS_SCHED_CONFIG_H_

#include "sched/scheduler.h"
#include "topo/topology.h"

namespace turbobus::sched {

/// `base` with the lanes and caps of `plan`: lane i runs on `plan.paths[i]`.
/// Each lane's window is two blocks, one that moves and one behind it.
Config ConfigFor(const topo::LanePlan& plan, Config base = {});

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_CONFIG_H_

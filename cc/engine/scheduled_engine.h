#ifndef TURBOBUS_ENGINE_SCHEDULED_ENGINE_H_
#define TURBOBUS_ENGINE_SCHEDULED_ENGINE_H_

#include <memory>

#include "base/status.h"
#include "engine/engine.h"
#include "sched/scheduler.h"
#include "transport/transport.h"

namespace turbobus::engine {

/// `Engine::Create` for a scheduler of the caller's own: how tests put in one
/// that misbehaves. The scheduler's lanes are those of the transport.
StatusOr<std::unique_ptr<Engine>> CreateEngine(
    std::unique_ptr<sched::Scheduler> scheduler,
    std::unique_ptr<transport::Transport> transport, double late_factor,
    Options options);

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_SCHEDULED_ENGINE_H_

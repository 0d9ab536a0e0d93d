#include "engine/engine.h"

#include <string>
#include <utility>

#include "engine/scheduled_engine.h"

namespace turbobus::engine {

StatusOr<std::unique_ptr<Engine>> Engine::Create(
    sched::Config config, std::unique_ptr<transport::Transport> transport,
    Options options) {
  if (transport == nullptr) {
    return InvalidArgument("transport: expected one, got null");
  }
  if (config.lanes.size() != transport->paths().size()) {
    return InvalidArgument(
        "config.lanes: expected one for each of the transport's " +
        std::to_string(transport->paths().size()) + " paths, got " +
        std::to_string(config.lanes.size()));
  }
  const double late_factor = config.late_factor;
  TB_ASSIGN_OR_RETURN(std::unique_ptr<sched::Scheduler> scheduler,
                      sched::Scheduler::Create(std::move(config)));
  return CreateEngine(std::move(scheduler), std::move(transport), late_factor,
                      std::move(options));
}

}  // namespace turbobus::engine

#ifndef TURBOBUS_ENGINE_HOST_ENGINE_H_
#define TURBOBUS_ENGINE_HOST_ENGINE_H_

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "engine/engine.h"
#include "sched/scheduler.h"
#include "topo/topology.h"
#include "transport/host/host_transport.h"

namespace turbobus::engine {

struct HostEngineOptions {
  /// Whether transfers take the time that the topology's links would need.
  bool is_emulated = false;
  /// Whether lanes through relay GPUs are used.
  bool is_pooled = true;
  /// All rates of the topology are multiplied by this.
  double rate_scale = 1;
  sched::Mode mode = sched::Mode::kFreeRunning;
  int64_t block_bytes = 16 << 20;
  /// 0: eight blocks.
  int64_t chunk_bytes = 0;
  int64_t trace_capacity = 0;
  /// Copying threads; 0: one a CPU.
  int num_threads = 0;
};

struct HostEngine {
  std::shared_ptr<Engine> engine;
  /// The engine's own, for its fault hooks; lives as long as the engine.
  transport::host::HostTransport* transport = nullptr;
};

/// An engine for CPU devices with lanes for every GPU of `topology`, both ways,
/// to and from its nearest memory. INVALID_ARGUMENT, naming the option, for one
/// that cannot work.
StatusOr<HostEngine> CreateHostEngine(const topo::Topology& topology,
                                      const HostEngineOptions& options);

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_HOST_ENGINE_H_

#include "engine/engine.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "engine/host_engine.h"
#include "engine/live_page.h"
#include "python/bindings.h"
#include "python/transfer.h"
#include "sched/scheduler.h"
#include "topo/topology.h"

namespace turbobus::python {
namespace {

namespace py = pybind11;

const char* DirectionName(topo::Direction direction) {
  return direction == topo::Direction::kH2d ? "h2d" : "d2h";
}

topo::Direction ParseDirection(const std::string& name) {
  if (name == "h2d") return topo::Direction::kH2d;
  if (name == "d2h") return topo::Direction::kD2h;
  throw py::value_error("direction: expected 'h2d' or 'd2h', got '" + name +
                        "'");
}

sched::Mode ParseMode(const std::string& name) {
  if (name == "free-running") return sched::Mode::kFreeRunning;
  if (name == "lock-step") return sched::Mode::kLockStep;
  throw py::value_error("mode: expected 'free-running' or 'lock-step', got '" +
                        name + "'");
}

py::dict ToDict(const engine::LaneStats& lane) {
  using namespace py::literals;  // NOLINT
  return py::dict(
      "name"_a = lane.name, "gpu"_a = lane.path.gpu,
      "relay"_a = lane.path.is_relay() ? py::object(py::int_(lane.path.relay))
                                       : py::object(py::none()),
      "direction"_a = DirectionName(lane.path.direction),
      "numa_node"_a = lane.path.numa_node,
      "bandwidth_bytes_per_s"_a = lane.path.bandwidth_bytes_per_s,
      "num_bytes"_a = lane.num_bytes, "num_blocks"_a = lane.num_blocks,
      "busy_ns"_a = lane.busy_ns, "queued_ns"_a = lane.queued_ns,
      "num_late_blocks"_a = lane.num_late_blocks,
      "num_failed_blocks"_a = lane.num_failed_blocks,
      "num_bytes_in_flight"_a = lane.num_bytes_in_flight,
      "is_removed"_a = lane.is_removed, "reason"_a = lane.reason);
}

py::dict ToDict(const engine::LinkStats& link) {
  using namespace py::literals;  // NOLINT
  return py::dict("name"_a = link.name,
                  "bandwidth_bytes_per_s"_a = link.bandwidth_bytes_per_s,
                  "num_bytes"_a = link.num_bytes,
                  "num_blocks"_a = link.num_blocks, "busy_ns"_a = link.busy_ns);
}

py::dict ToDict(const engine::TransferStats& transfer) {
  using namespace py::literals;  // NOLINT
  return py::dict(
      "id"_a = transfer.id, "gpu"_a = transfer.gpu,
      "direction"_a = DirectionName(transfer.direction),
      "size_bytes"_a = transfer.size_bytes,
      "status"_a = std::string(StatusCodeName(transfer.status.code())),
      "message"_a = transfer.status.message(),
      "submitted_ns"_a = transfer.submitted_ns,
      "started_ns"_a = transfer.started_ns, "ended_ns"_a = transfer.ended_ns,
      "num_blocks"_a = transfer.num_blocks,
      "num_relayed_bytes"_a = transfer.num_relayed_bytes,
      "num_reissued_blocks"_a = transfer.num_reissued_blocks,
      "reissue_reason"_a = transfer.reissue_reason);
}

py::dict ToDict(const engine::TraceEvent& event) {
  using namespace py::literals;  // NOLINT
  return py::dict(
      "transfer"_a = event.transfer, "lane"_a = event.lane, "gpu"_a = event.gpu,
      "direction"_a = DirectionName(event.direction),
      "offset_bytes"_a = event.offset_bytes, "size_bytes"_a = event.size_bytes,
      "issued_ns"_a = event.issued_ns, "start_ns"_a = event.start_ns,
      "relayed_ns"_a = event.relayed_ns, "resumed_ns"_a = event.resumed_ns,
      "end_ns"_a = event.end_ns,
      "status"_a = std::string(StatusCodeName(event.code)));
}

template <typename T>
py::list ToList(const std::vector<T>& entries) {
  py::list list;
  for (const T& entry : entries) list.append(ToDict(entry));
  return list;
}

class PyEngine {
 public:
  PyEngine(const topo::Topology& topology,
           const engine::HostEngineOptions& options)
      : engine_(ValueOrRaise(engine::CreateHostEngine(topology, options))) {}

  ~PyEngine() {
    // Draining waits for callbacks, and those may want the interpreter.
    const py::gil_scoped_release release;
    engine_.engine.reset();
  }

  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  const std::shared_ptr<engine::Engine>& engine() const {
    return engine_.engine;
  }

  bool is_held() const { return engine_.engine.use_count() > 1; }

  std::unique_ptr<PyTransfer> Submit(int gpu, const std::string& direction,
                                     const py::buffer& src,
                                     const py::buffer& dst, int numa_node) {
    return std::make_unique<PyTransfer>(
        engine_.engine, gpu, ParseDirection(direction), src, dst, numa_node);
  }

  void Abort(const std::string& reason) {
    engine_.engine->Abort({StatusCode::kAborted, reason});
  }

  py::dict GetStats() const {
    using namespace py::literals;  // NOLINT
    const engine::Stats stats = engine_.engine->GetStats();
    return py::dict(
        "now_ns"_a = stats.now_ns, "created_ns"_a = stats.created_ns,
        "num_submitted"_a = stats.num_submitted,
        "num_in_flight"_a = stats.num_in_flight,
        "num_completed"_a = stats.num_completed,
        "num_failed"_a = stats.num_failed,
        "num_cancelled"_a = stats.num_cancelled,
        "num_completed_bytes"_a = stats.num_completed_bytes,
        "num_blocks_in_flight"_a = stats.num_blocks_in_flight,
        "num_reissued_blocks"_a = stats.num_reissued_blocks,
        "num_late_copies"_a = engine_.transport->num_late_copies(),
        "lanes"_a = ToList(stats.lanes), "links"_a = ToList(stats.links),
        "recent_transfers"_a = ToList(stats.recent_transfers));
  }

  void FailBlocks(int lane, int64_t skip, int64_t count) {
    if (lane != -1) CheckLane(lane);
    engine_.transport->FailBlocks(lane, skip, count);
  }
  void VanishLane(int lane) {
    CheckLane(lane);
    engine_.transport->VanishLane(lane);
  }
  void SlowLane(int lane, double factor) {
    CheckLane(lane);
    if (!(factor > 0)) {
      throw py::value_error("factor: expected a positive number, got " +
                            std::to_string(factor));
    }
    engine_.transport->SlowLane(lane, factor);
  }

 private:
  void CheckLane(int lane) const {
    const int64_t num_lanes = std::ssize(engine_.transport->paths());
    if (lane >= 0 && lane < num_lanes) return;
    throw py::value_error("lane: expected 0 to " +
                          std::to_string(num_lanes - 1) + ", got " +
                          std::to_string(lane));
  }

  engine::HostEngine engine_;
};

std::unique_ptr<PyEngine> MakeEngine(const topo::Topology& topology,
                                     bool emulate, bool pooled,
                                     double rate_scale, const std::string& mode,
                                     int64_t block_bytes, int64_t chunk_bytes,
                                     int64_t trace_capacity, int num_threads) {
  return std::make_unique<PyEngine>(
      topology, engine::HostEngineOptions{.is_emulated = emulate,
                                          .is_pooled = pooled,
                                          .rate_scale = rate_scale,
                                          .mode = ParseMode(mode),
                                          .block_bytes = block_bytes,
                                          .chunk_bytes = chunk_bytes,
                                          .trace_capacity = trace_capacity,
                                          .num_threads = num_threads});
}

}  // namespace

void BindEngine(py::module_& module) {
  py::class_<PyTransfer>(module, "Transfer")
      .def_property_readonly("id", &PyTransfer::id)
      .def_property_readonly("is_done", &PyTransfer::is_done)
      .def("wait", &PyTransfer::Wait, py::arg("timeout_s") = py::none(),
           "Waits until it is over, raises what it failed with; False: timed "
           "out.")
      .def("cancel", &PyTransfer::Cancel);

  py::class_<PyEngine>(module, "Engine")
      .def(py::init(&MakeEngine), py::arg("topology"), py::kw_only(),
           py::arg("emulate") = false, py::arg("pooled") = true,
           py::arg("rate_scale") = 1.0, py::arg("mode") = "free-running",
           py::arg("block_bytes") = 16 << 20, py::arg("chunk_bytes") = 0,
           py::arg("trace_capacity") = 0, py::arg("num_threads") = 0)
      .def("submit", &PyEngine::Submit, py::arg("gpu"), py::arg("direction"),
           py::arg("src"), py::arg("dst"),
           py::arg("numa_node") = engine::kNearestNumaNode,
           "Starts a transfer between two contiguous buffers of one size.")
      .def("abort", &PyEngine::Abort, py::arg("reason"))
      .def("stats", &PyEngine::GetStats)
      .def_property_readonly(
          "is_held", &PyEngine::is_held,
          "Whether transfers, or the process, hold the engine as well.")
      .def("trace",
           [](const PyEngine& engine) {
             return ToList(engine.engine()->Trace());
           })
      .def("fail_blocks", &PyEngine::FailBlocks, py::kw_only(),
           py::arg("lane") = -1, py::arg("skip") = 0, py::arg("count") = 1)
      .def("vanish_lane", &PyEngine::VanishLane, py::arg("lane"))
      .def("slow_lane", &PyEngine::SlowLane, py::arg("lane"),
           py::arg("factor"));

  module.def(
      "set_process_engine",
      [](const PyEngine* engine) {
        std::shared_ptr<engine::Engine> next;
        if (engine != nullptr) next = engine->engine();
        const py::gil_scoped_release release;
        engine::SetProcessEngine(std::move(next));
      },
      py::arg("engine").none(true),
      "Makes transfers of this process go through `engine`; None: plain "
      "copies.");
  module.def(
      "try_live_page",
      [] {
        RaiseIfError(
            engine::LivePage::Create(engine::LivePage::Kind::kPlain, {})
                .status());
        return engine::LivePage::Folder();
      },
      "Returns where this process publishes what it moves; raises why it does "
      "not.");
  module.def("has_process_engine",
             [] { return engine::ProcessEngine() != nullptr; });
}

}  // namespace turbobus::python

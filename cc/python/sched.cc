#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "python/bindings.h"
#include "sched/config.h"
#include "sched/replay.h"
#include "sched/scheduler.h"

// For the simulator, benchmarks and property tests: the scheduler itself, event
// by event. Not thread-safe, and everything returns at once: the GIL is kept.

namespace turbobus::python {
namespace {

namespace py = pybind11;
using sched::Block;
using sched::CapSpec;
using sched::Config;
using sched::LaneSpec;
using sched::LaneState;
using sched::Mode;
using sched::Scheduler;
using sched::Transfer;
using topo::Direction;

std::string Repr(const Block& block) {
  return "<Block " + std::to_string(block.id) + " of transfer " +
         std::to_string(block.transfer) + " on lane " +
         std::to_string(block.lane) + ": " + std::to_string(block.size_bytes) +
         " bytes at " + std::to_string(block.offset_bytes) + ">";
}

/// What Python holds; lanes are checked here, C++ callers know theirs.
struct Handle {
  std::unique_ptr<Scheduler> scheduler;
  int num_lanes = 0;

  LaneState StateOf(int lane) const {
    if (lane < 0 || lane >= num_lanes) {
      throw py::value_error("lane: expected 0 to " +
                            std::to_string(num_lanes - 1) + ", got " +
                            std::to_string(lane));
    }
    return scheduler->lane_state(lane);
  }
};

void BindConfig(py::module_& module) {
  py::enum_<Mode>(module, "SchedMode")
      .value("FREE_RUNNING", Mode::kFreeRunning)
      .value("LOCK_STEP", Mode::kLockStep);
  py::class_<LaneSpec>(module, "LaneSpec")
      .def(py::init([](topo::Path path, int64_t window_bytes,
                       std::vector<int> caps) {
             return LaneSpec{.path = std::move(path),
                             .window_bytes = window_bytes,
                             .caps = std::move(caps)};
           }),
           py::kw_only(), py::arg("path"), py::arg("window_bytes") = 32 << 20,
           py::arg("caps") = std::vector<int>())
      .def_readwrite("path", &LaneSpec::path)
      .def_readwrite("window_bytes", &LaneSpec::window_bytes)
      .def_readwrite("caps", &LaneSpec::caps);
  py::class_<CapSpec>(module, "CapSpec")
      .def(py::init([](std::string name, double bandwidth_bytes_per_s) {
             return CapSpec{std::move(name), bandwidth_bytes_per_s};
           }),
           py::arg("name"), py::arg("bandwidth_bytes_per_s"))
      .def_readwrite("name", &CapSpec::name)
      .def_readwrite("bandwidth_bytes_per_s", &CapSpec::bandwidth_bytes_per_s);
  py::class_<Config>(module, "SchedConfig",
                     "What a `Scheduler` is made from; see "
                     "cc/sched/scheduler.h.")
      .def(py::init<>())
      .def_readwrite("lanes", &Config::lanes)
      .def_readwrite("caps", &Config::caps)
      .def_readwrite("mode", &Config::mode)
      .def_readwrite("block_bytes", &Config::block_bytes)
      .def_readwrite("chunk_bytes", &Config::chunk_bytes)
      .def_readwrite("has_token_gate", &Config::has_token_gate)
      .def_readwrite("late_factor", &Config::late_factor)
      .def_readwrite("probe_interval_ns", &Config::probe_interval_ns)
      .def_readwrite("max_probe_interval_ns", &Config::max_probe_interval_ns)
      .def(
          "use_plan",
          [](Config& config, const topo::LanePlan& plan) {
            config = sched::ConfigFor(plan, config);
          },
          py::arg("plan"), "Takes lanes and caps from a `LanePlan`.");
}

void BindScheduler(py::module_& module) {
  py::class_<Block>(module, "Block")
      .def_readonly("id", &Block::id)
      .def_readonly("transfer", &Block::transfer)
      .def_readonly("lane", &Block::lane)
      .def_readonly("offset_bytes", &Block::offset_bytes)
      .def_readonly("size_bytes", &Block::size_bytes)
      .def_readonly("num_failures", &Block::num_failures)
      .def("__repr__", &Repr);
  py::class_<LaneState>(module, "LaneState")
      .def_readonly("in_flight_bytes", &LaneState::in_flight_bytes)
      .def_readonly("num_issued_blocks", &LaneState::num_issued_blocks)
      .def_readonly("issued_bytes", &LaneState::issued_bytes)
      .def_readonly("lateness", &LaneState::lateness)
      .def_readonly("is_backed_off", &LaneState::is_backed_off)
      .def_readonly("is_removed", &LaneState::is_removed);
  py::class_<Handle>(module, "Scheduler",
                     "Decides which block each lane copies next; events in, "
                     "blocks out. Times are the caller's, in nanoseconds, "
                     "and never decrease.")
      .def(py::init([](const Config& config) {
             return Handle{ValueOrRaise(Scheduler::Create(config)),
                           static_cast<int>(config.lanes.size())};
           }),
           py::arg("config"))
      .def(
          "submit",
          [](const Handle& h, sched::TransferId transfer, int gpu,
             Direction direction, int64_t size_bytes, int numa_node,
             int64_t now_ns) {
            RaiseIfError(h.scheduler->Submit({.id = transfer,
                                              .gpu = gpu,
                                              .direction = direction,
                                              .size_bytes = size_bytes,
                                              .numa_node = numa_node},
                                             now_ns));
          },
          py::kw_only(), py::arg("transfer"), py::arg("gpu"),
          py::arg("direction"), py::arg("size_bytes"), py::arg("numa_node") = 0,
          py::arg("now_ns"))
      .def(
          "next",
          [](const Handle& h, int64_t now_ns) {
            return h.scheduler->Next(now_ns);
          },
          py::arg("now_ns"), "The next block that can be issued now, or None.")
      .def(
          "drain",
          [](const Handle& h, int64_t now_ns) {
            std::vector<Block> blocks;
            while (auto block = h.scheduler->Next(now_ns))
              blocks.push_back(*block);
            return blocks;
          },
          py::arg("now_ns"), "All blocks that can be issued now.")
      .def(
          "complete",
          [](const Handle& h, sched::BlockId block, int64_t now_ns) {
            RaiseIfError(h.scheduler->Complete(block, now_ns));
          },
          py::arg("block"), py::arg("now_ns"))
      .def(
          "fail",
          [](const Handle& h, sched::BlockId block, int64_t now_ns) {
            RaiseIfError(h.scheduler->Fail(block, now_ns));
          },
          py::arg("block"), py::arg("now_ns"))
      .def(
          "cancel",
          [](const Handle& h, sched::TransferId transfer, int64_t now_ns) {
            RaiseIfError(h.scheduler->Cancel(transfer, now_ns));
          },
          py::arg("transfer"), py::arg("now_ns"))
      .def(
          "remove_lane",
          [](const Handle& h, int lane, int64_t now_ns) {
            RaiseIfError(h.scheduler->RemoveLane(lane, now_ns));
          },
          py::arg("lane"), py::arg("now_ns"))
      .def(
          "take_finished",
          [](const Handle& h) {
            std::vector<std::pair<sched::TransferId, bool>> out;
            for (const sched::Finished& f : h.scheduler->TakeFinished()) {
              out.emplace_back(f.transfer, f.is_cancelled);
            }
            return out;
          },
          "Pairs (transfer, was cancelled) since the last call.")
      .def("take_stranded",
           [](const Handle& h) { return h.scheduler->TakeStranded(); })
      .def("next_wakeup_ns",
           [](const Handle& h) { return h.scheduler->NextWakeupNs(); })
      .def("rescan", [](const Handle& h) { h.scheduler->Rescan(); })
      .def("lane_state", &Handle::StateOf, py::arg("lane"))
      .def_readonly("num_lanes", &Handle::num_lanes)
      .def_property_readonly(
          "is_idle", [](const Handle& h) { return h.scheduler->is_idle(); });
}

}  // namespace

void BindSched(py::module_& module) {
  BindConfig(module);
  BindScheduler(module);
  module.def(
      "replay",
      [](const Config& config,
         const std::vector<std::tuple<int, Direction, int64_t>>& transfers,
         int num_concurrent) {
        std::vector<Transfer> list;
        for (const auto& [gpu, direction, size_bytes] : transfers) {
          list.push_back({.id = static_cast<sched::TransferId>(list.size()),
                          .gpu = gpu,
                          .direction = direction,
                          .size_bytes = size_bytes});
        }
        const sched::ReplayResult result =
            ValueOrRaise(sched::Replay(config, list, num_concurrent));
        return std::make_pair(result.num_blocks, result.end_ns);
      },
      py::arg("config"), py::arg("transfers"), py::arg("num_concurrent"),
      "Runs (gpu, direction, size_bytes) transfers in virtual time, as fast as "
      "decisions allow; (blocks issued, end in ns).");
}

}  // namespace turbobus::python

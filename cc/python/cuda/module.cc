#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/stream_engine.h"
#include "ffi/cuda/process_stream_engine.h"
#include "ffi/cuda/targets.h"
#include "moe/blocking_meeting.h"
#include "moe/cuda/gpu_traffic.h"
#include "moe/cuda/ring_timing.h"
#include "moe/cuda/side_streams.h"
#include "moe/cuda/wiring.h"
#include "python/bindings.h"
#include "python/cuda/settings.h"
#include "transport/cuda/cuda_streams.h"
#include "transport/cuda/device_guard.h"
#include "transport/cuda/process_peer_access.h"

namespace turbobus::python {
namespace {

namespace py = pybind11;
using namespace py::literals;  // NOLINT
using engine::StreamEngine;
using engine::StreamSettings;
using transport::cuda::CudaStreams;
using transport::cuda::DeviceGuard;
using transport::cuda::ProcessPeerAccess;
using transport::cuda::YieldKind;

/// (gpu, relay or None, "h2d" or "d2h", bytes per second)
using PathTuple = std::tuple<int, std::optional<int>, std::string, double>;

const char* DirectionName(topo::Direction direction) {
  return direction == topo::Direction::kH2d ? "h2d" : "d2h";
}

topo::Direction ParseDirection(const std::string& name) {
  if (name == "h2d") return topo::Direction::kH2d;
  if (name == "d2h") return topo::Direction::kD2h;
  throw py::value_error("direction: expected 'h2d' or 'd2h', got '" + name +
                        "'");
}

py::object RelayOf(const topo::Path& path) {
  if (!path.is_relay()) return py::none();
  return py::int_(path.relay);
}

/// CUDA's view of the machine, made when first asked for; null after the engine
/// took it.
std::unique_ptr<CudaStreams>& Unstarted() {
  static auto* const streams = new std::unique_ptr<CudaStreams>;
  return *streams;
}

CudaStreams& Cuda() {
  if (const auto engine = ffi::ProcessStreamEngine(); engine.ok()) {
    return static_cast<CudaStreams&>((*engine)->streams());
  }
  if (Unstarted() == nullptr) Unstarted() = ValueOrRaise(CudaStreams::Create());
  return *Unstarted();
}

StreamEngine& Engine() { return *ValueOrRaise(ffi::ProcessStreamEngine()); }

py::list Gpus() {
  py::list gpus;
  for (const transport::cuda::GpuInfo& gpu : Cuda().gpus()) {
    gpus.append(py::dict("name"_a = gpu.name, "uuid"_a = gpu.uuid,
                         "pci_bus_id"_a = gpu.pci_bus_id,
                         "memory_bytes"_a = gpu.memory_bytes));
  }
  return gpus;
}

void Start(const std::vector<PathTuple>& tuples, const py::dict& settings) {
  std::vector<topo::Path> paths;
  for (const auto& [gpu, relay, direction, rate] : tuples) {
    topo::Path path;
    path.gpu = gpu;
    path.relay = relay.value_or(topo::kNoRelay);
    path.direction = ParseDirection(direction);
    path.bandwidth_bytes_per_s = rate;
    paths.push_back(path);
  }
  (void)Cuda();  // raises where CUDA does not work
  if (Unstarted() == nullptr) {
    RaiseIfError(Status(StatusCode::kAlreadyExists,
                        "the engine of the GPUs has been started already"));
  }
  const StreamSettings parsed = Changed(StreamSettings{}, settings);
  Status status;
  {
    const py::gil_scoped_release release;
    const DeviceGuard guard;
    auto engine =
        StreamEngine::Create(std::move(Unstarted()), std::move(paths), parsed);
    status = engine.status();
    if (status.ok()) {
      // What happens while programs run has no Python thread to say it on.
      (*engine)->SetLog([](const std::string& message) {
        std::fprintf(stderr, "jax_turbobus: %s\n", message.c_str());
      });
      // Without it transfers run all the same; `doctor` says why.
      (void)(*engine)->Publish();
      status = ffi::SetProcessStreamEngine(std::move(engine).value());
    }
  }
  RaiseIfError(status);
}

py::dict Stats() {
  engine::StreamStats stats;
  std::vector<engine::TransferRecord> records;
  {
    StreamEngine& engine = Engine();
    const py::gil_scoped_release release;
    const DeviceGuard guard;
    stats = engine.stats();
    records = engine.recent_transfers();
  }
  py::list paths;
  for (const engine::PathStats& path : stats.paths) {
    paths.append(py::dict(
        "gpu"_a = path.path.gpu, "relay"_a = RelayOf(path.path),
        "direction"_a = DirectionName(path.path.direction),
        "bandwidth_bytes_per_s"_a = path.path.bandwidth_bytes_per_s,
        "num_transfers"_a = path.num_transfers,
        "num_blocks"_a = path.num_blocks, "num_bytes"_a = path.size_bytes,
        "busy_ns"_a = path.busy_ns, "num_late"_a = path.num_late,
        "is_backed_off"_a = path.is_backed_off, "share"_a = path.share,
        "num_failed"_a = path.num_failed,
        "num_bytes_in_flight"_a = path.bytes_in_flight,
        "has_rival"_a = path.has_rival, "dropped"_a = path.dropped,
        "left_out"_a = path.left_out));
  }
  py::list transfers;
  for (const engine::TransferRecord& one : records) {
    transfers.append(py::dict(
        "id"_a = one.id, "call"_a = one.call, "gpu"_a = one.gpu,
        "direction"_a = DirectionName(one.direction),
        "size_bytes"_a = one.size_bytes, "num_blocks"_a = one.num_blocks,
        "num_relayed_bytes"_a = one.relayed_bytes,
        "num_reissued_blocks"_a = one.num_reissued_blocks,
        "reissue_reason"_a = one.reissue_reason,
        "status"_a = std::string(StatusCodeName(one.status.code())),
        "message"_a = one.status.message(), "submitted_ns"_a = one.submitted_ns,
        "started_ns"_a = one.started_ns, "ended_ns"_a = one.ended_ns));
  }
  return py::dict(
      "paths"_a = paths, "recent_transfers"_a = transfers,
      "now_ns"_a = stats.now_ns, "created_ns"_a = stats.created_ns,
      "num_completed"_a = stats.num_completed,
      "completed_bytes"_a = stats.completed_bytes,
      "num_failed"_a = stats.num_failed,
      "num_reissued_blocks"_a = stats.num_reissued_blocks,
      "num_blocks_in_flight"_a = stats.num_blocks_in_flight,
      "num_pooled"_a = stats.num_pooled, "num_direct"_a = stats.num_direct,
      "num_plain"_a = stats.num_plain, "plain_bytes"_a = stats.plain_bytes,
      "num_rows_by_cores"_a = stats.num_rows_by_cores,
      "num_rows_guessed"_a = stats.num_rows_guessed,
      "num_guesses_right"_a = stats.num_guesses_right,
      "num_guesses_wrong"_a = stats.num_guesses_wrong,
      "num_in_flight"_a = stats.num_in_flight,
      "num_started"_a = stats.num_started,
      "staging_bytes"_a = stats.staging_bytes,
      "num_events"_a = stats.num_events, "handler_ns"_a = stats.handler_ns);
}

py::list TakeSpans() {
  std::vector<engine::StreamSpan> spans;
  {
    StreamEngine& engine = Engine();
    const py::gil_scoped_release release;
    const DeviceGuard guard;
    spans = engine.TakeSpans();
  }
  py::list out;
  for (const engine::StreamSpan& span : spans) {
    out.append(py::dict(
        "path"_a = span.path, "transfer"_a = span.transfer,
        "call"_a = span.call, "offset_bytes"_a = span.offset_bytes,
        "size_bytes"_a = span.size_bytes, "issued_ns"_a = span.issued_ns,
        "start_ns"_a = span.start_ns, "relayed_ns"_a = span.relayed_ns,
        "resumed_ns"_a = span.resumed_ns, "end_ns"_a = span.end_ns,
        "status"_a = std::string(StatusCodeName(span.code))));
  }
  return out;
}

std::vector<double> Measure(const std::vector<int>& paths, int64_t size_bytes,
                            int64_t block_bytes) {
  StatusOr<std::vector<double>> rates = Internal("");
  {
    StreamEngine& engine = Engine();
    const py::gil_scoped_release release;
    const DeviceGuard guard;
    rates = engine.Measure(paths, size_bytes, block_bytes);
  }
  return ValueOrRaise(std::move(rates));
}

/// (source, reader, "host" or "peer"); CUDA ordinals.
using WayTuple = std::tuple<int, int, std::string>;

std::vector<double> TimeWays(const std::vector<WayTuple>& tuples,
                             int64_t size_bytes, int num_slots,
                             int64_t slot_bytes, int repeats) {
  std::vector<moe::cuda::Way> ways;
  for (const auto& [source, reader, kind] : tuples) {
    if (kind != "host" && kind != "peer") {
      throw py::value_error("ways: expected 'host' or 'peer', got '" + kind +
                            "'");
    }
    ways.push_back({source,
                    reader,
                    {.kind = kind == "peer" ? moe::cuda::Path::Kind::kPeer
                                            : moe::cuda::Path::Kind::kHost}});
  }
  StatusOr<std::vector<double>> seconds = Internal("");
  {
    const py::gil_scoped_release release;
    seconds = moe::cuda::TimeWays(
        ways, size_bytes, {.num_slots = num_slots, .slot_bytes = slot_bytes},
        repeats);
  }
  return ValueOrRaise(std::move(seconds));
}

void SetYieldKind(const std::string& name) {
  if (name == "none") {
    Cuda().set_yield_kind(YieldKind::kNone);
  } else if (name == "word") {
    Cuda().set_yield_kind(YieldKind::kWord);
  } else if (name == "kernel") {
    Cuda().set_yield_kind(YieldKind::kKernel);
  } else {
    throw py::value_error("expected 'none', 'word' or 'kernel', got '" + name +
                          "'");
  }
}

std::string YieldKindName() {
  switch (Cuda().yield_kind()) {
    case YieldKind::kNone:
      return "none";
    case YieldKind::kWord:
      return "word";
    default:
      return "kernel";
  }
}

py::list ExchangeTraffic() {
  StatusOr<std::vector<moe::Traffic>> traffic = Internal("");
  {
    const py::gil_scoped_release release;
    traffic = moe::cuda::GpuTraffic::Process().Read();
  }
  return ToList(ValueOrRaise(std::move(traffic)));
}

void ResetExchangeTraffic() {
  Status status;
  {
    const py::gil_scoped_release release;
    status = moe::cuda::GpuTraffic::Process().Reset();
  }
  RaiseIfError(status);
}

py::dict FfiTargets() {
  py::dict targets;
  for (const ffi::Target& target : ffi::CudaTargets()) {
    py::dict stages;
    stages["execute"] = py::capsule(reinterpret_cast<void*>(target.execute));
    if (target.initialize != nullptr) {
      stages["initialize"] =
          py::capsule(reinterpret_cast<void*>(target.initialize));
    }
    targets[target.name] = stages;
  }
  return targets;
}

py::dict FfiTypes() {
  py::dict types;
  for (const ffi::StateType& type : ffi::CudaStateTypes()) {
    types[type.name] = py::dict(
        "type_id"_a = py::capsule(type.id),
        "type_info"_a = py::capsule(static_cast<const void*>(type.info)));
  }
  return types;
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "CUDA half of jax_turbobus; use it through the package.";
  module.attr("ffi_api_version") =
      py::make_tuple(ffi::kApiVersionMajor, ffi::kApiVersionMinor);
  module.def("ffi_targets", &FfiTargets,
             "XLA FFI handlers by target name: {name: {stage: capsule}}.");
  module.def("ffi_types", &FfiTypes,
             "XLA FFI types of states by name: {name: {part: capsule}}.");
  module.def("gpus", &Gpus, "The GPUs of this process, by CUDA ordinal.");
  module.def(
      "can_access_peer",
      [](int relay, int gpu) {
        const py::gil_scoped_release release;
        return ProcessPeerAccess().Has(relay, gpu);
      },
      "relay"_a, "gpu"_a,
      "Whether GPU `relay` reaches the memory of GPU `gpu`, which this lets it "
      "(JAX_TURBOBUS_PEER_ACCESS=0, or an allocator that lets no peer in: "
      "never).");
  module.def(
      "why_no_peer_access",
      [](int relay, int gpu) {
        const py::gil_scoped_release release;
        return ProcessPeerAccess().Check(relay, gpu).message();
      },
      "relay"_a, "gpu"_a, "Why it does not; empty if it does.");
  module.def(
      "set_exchange_timeout",
      [](double seconds) {
        moe::BlockingMeeting::Process().set_timeout(
            std::chrono::milliseconds(std::llround(std::ceil(seconds * 1e3))));
      },
      "seconds"_a, "How long a rank waits for the others of a call.");
  module.attr("most_mailed_bytes") = moe::cuda::kMostMailedBytes;
  module.def(
      "exchange_slots",
      [] {
        const auto size = ValueOrRaise(moe::cuda::RingSize::FromEnvironment());
        return std::pair(size.num_slots, size.slot_bytes);
      },
      "Number and bytes of the slots of a ring that is made now.");
  module.def(
      "set_measured_slots",
      [](int num_slots, int64_t slot_bytes) {
        RaiseIfError(moe::cuda::RingSize::SetMeasured({num_slots, slot_bytes}));
      },
      "num_slots"_a, "slot_bytes"_a,
      "Says which slots measured best; the environment goes before.");
  module.def("time_ways", &TimeWays, "ways"_a, "size_bytes"_a, "num_slots"_a,
             "slot_bytes"_a, "repeats"_a,
             "Seconds of each way (source, reader, 'host' or 'peer') when all "
             "carry size_bytes at once, as exchanges do.");
  module.def(
      "num_exchanges_under_way",
      [] { return moe::cuda::SideStreams::Process().num_under_way(); },
      "Exchanges beside a program that are started and not finished.");
  module.def("exchange_traffic", &ExchangeTraffic,
             "What exchanges have moved between GPUs since the last reset.");
  module.def("reset_exchange_traffic", &ResetExchangeTraffic,
             "Starts the counts of exchange_traffic again.");
  module.def("start", &Start, "paths"_a, "settings"_a,
             "Makes this process's engine over paths (gpu, relay or None, "
             "direction, bytes per second).");
  module.def("is_started",
             [] { return ffi::ProcessStreamEngine().status().ok(); });
  module.def(
      "set_settings",
      [](const py::dict& values) {
        RaiseIfError(
            Engine().SetSettings(Changed(Engine().settings(), values)));
      },
      "settings"_a);
  module.def("settings", [] { return ToDict(Engine().settings()); });
  module.def(
      "set_rates",
      [](const std::vector<double>& rates) {
        RaiseIfError(Engine().SetRates(rates));
      },
      "bandwidth_bytes_per_s"_a);
  module.def("set_yield_kind", &SetYieldKind, "name"_a);
  module.def("yield_kind", &YieldKindName);
  module.def("stats", &Stats);
  module.def("take_spans", &TakeSpans);
  module.def("take_messages", [] { return Engine().TakeMessages(); });
  module.def("measure", &Measure, "paths"_a, "size_bytes"_a, "block_bytes"_a,
             "Bytes per second of each path when all copy at once.");
  module.def(
      "inject_fault", [](int relay) { Engine().InjectFault(relay); },
      "relay"_a);
}

}  // namespace turbobus::python

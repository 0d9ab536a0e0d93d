#include <pybind11/stl.h>

#include "python/bindings.h"
#include "topo/topology.h"

namespace turbobus::python {
namespace {

namespace py = pybind11;
using topo::Direction;
using topo::Path;
using topo::Topology;

int CheckIndex(std::string_view argument, int index, size_t size) {
  if (index >= 0 && static_cast<size_t>(index) < size) return index;
  const std::string last = std::to_string(static_cast<int64_t>(size) - 1);
  throw py::value_error(std::string(argument) + ": expected 0 to " + last +
                        ", got " + std::to_string(index) +
                        "; the topology has " + std::to_string(size));
}

int CheckGpu(const Topology& topology, std::string_view argument, int gpu) {
  return CheckIndex(argument, gpu, topology.gpus().size());
}

int CheckNuma(const Topology& topology, int node) {
  return CheckIndex("numa_node", node, topology.numa_nodes().size());
}

py::object OrNone(double value) {
  return value == 0 ? py::object(py::none()) : py::object(py::float_(value));
}

// Dictionaries whose keys are the fields of the dataclasses in
// topology/_parts.py.

py::list Gpus(const Topology& topology) {
  py::list out;
  for (size_t i = 0; i < topology.gpus().size(); ++i) {
    const topo::Gpu& gpu = topology.gpus()[i];
    out.append(py::dict(
        py::arg("index") = i, py::arg("id") = gpu.id,
        py::arg("name") = gpu.name, py::arg("uuid") = gpu.uuid,
        py::arg("pci_address") = gpu.pci_address,
        py::arg("numa_node") = gpu.numa_node,
        py::arg("link_group") = topology.LinkGroupOf(static_cast<int>(i))));
  }
  return out;
}

py::list NumaNodes(const Topology& topology) {
  py::list out;
  for (size_t i = 0; i < topology.numa_nodes().size(); ++i) {
    const topo::NumaNode& node = topology.numa_nodes()[i];
    out.append(py::dict(
        py::arg("index") = i, py::arg("id") = node.id,
        py::arg("memory_bytes_per_s") = OrNone(node.memory_bytes_per_s)));
  }
  return out;
}

py::list Switches(const Topology& topology) {
  py::list out;
  for (const topo::Switch& node : topology.graph().switches) {
    out.append(
        py::dict(py::arg("id") = node.id,
                 py::arg("type") = std::string(topo::ToString(node.type))));
  }
  return out;
}

py::list Links(const Topology& topology) {
  py::list out;
  for (size_t i = 0; i < topology.links().size(); ++i) {
    const topo::Link& link = topology.links()[i];
    out.append(py::dict(
        py::arg("index") = i, py::arg("id") = link.id,
        py::arg("type") = std::string(topo::ToString(link.type)),
        py::arg("a") = topo::NodeId(topology.graph(), link.a),
        py::arg("b") = topo::NodeId(topology.graph(), link.b),
        py::arg("a_to_b_bytes_per_s") = link.a_to_b_bytes_per_s,
        py::arg("b_to_a_bytes_per_s") = link.b_to_a_bytes_per_s,
        py::arg("duplex_bytes_per_s") = OrNone(link.duplex_bytes_per_s),
        py::arg("latency_ns") = link.latency_ns,
        py::arg("generation") = link.generation,
        py::arg("max_generation") = link.max_generation,
        py::arg("width") = link.width, py::arg("max_width") = link.max_width,
        py::arg("is_degraded") = link.is_degraded(),
        py::arg("rate_source") =
            std::string(topo::ToString(link.rate_source))));
  }
  return out;
}

py::list LinkGroups(const Topology& topology) {
  py::list out;
  for (size_t i = 0; i < topology.link_groups().size(); ++i) {
    const topo::LinkGroup& group = topology.link_groups()[i];
    out.append(py::dict(py::arg("index") = i, py::arg("id") = group.id,
                        py::arg("gpus") = py::tuple(py::cast(group.gpus)),
                        py::arg("h2d_bytes_per_s") = group.h2d_bytes_per_s,
                        py::arg("d2h_bytes_per_s") = group.d2h_bytes_per_s));
  }
  return out;
}

py::list PeerPaths(const Topology& topology, int src, int dst) {
  static constexpr const char* kKinds[] = {"peer", "relay", "host"};
  CheckGpu(topology, "src", src);
  CheckGpu(topology, "dst", dst);
  if (src == dst) {
    throw py::value_error("dst: expected a GPU other than src, got " +
                          std::to_string(dst) + " for both");
  }
  py::list out;
  for (const topo::PeerPath& path : topology.PeerPaths(src, dst)) {
    out.append(
        py::dict(py::arg("src") = path.src, py::arg("dst") = path.dst,
                 py::arg("kind") = kKinds[static_cast<int>(path.kind)],
                 py::arg("via") = path.via < 0 ? py::object(py::none())
                                               : py::object(py::int_(path.via)),
                 py::arg("bandwidth_bytes_per_s") = path.bandwidth_bytes_per_s,
                 py::arg("latency_ns") = path.latency_ns,
                 py::arg("links") = py::tuple(py::cast(path.links))));
  }
  return out;
}

std::vector<Path> Paths(const Topology& topology, int gpu, Direction direction,
                        std::optional<int> numa_node) {
  CheckGpu(topology, "gpu", gpu);
  if (!numa_node) return topology.Paths(gpu, direction);
  return topology.Paths(gpu, direction, CheckNuma(topology, *numa_node));
}

/// (link, crossed from a to b) for each link of a path that came from Python,
/// so nothing about it is trusted.
void CheckPath(const Topology& topology, const Path& path) {
  CheckGpu(topology, "path.gpu", path.gpu);
  if (path.is_relay()) CheckGpu(topology, "path.relay", path.relay);
  CheckNuma(topology, path.numa_node);
  if (path.links.empty()) {
    throw py::value_error("path.links: expected at least one link, got none");
  }
  for (const int link : path.links) {
    CheckIndex("path.links", link, topology.links().size());
  }
}

std::vector<std::pair<int, bool>> Hops(const Topology& topology,
                                       const Path& path) {
  CheckPath(topology, path);
  std::vector<std::pair<int, bool>> out;
  for (const topo::Hop& hop : topology.Hops(path)) {
    out.emplace_back(hop.link, hop.is_a_to_b);
  }
  return out;
}

std::vector<double> Rates(const Topology& topology,
                          const std::vector<Path>& paths) {
  for (const Path& path : paths) CheckPath(topology, path);
  return topology.Rates(paths);
}

std::string Repr(const Path& path) {
  const bool is_h2d = path.direction == Direction::kH2d;
  std::string text = "<Path gpu=" + std::to_string(path.gpu);
  if (path.is_relay()) text += " relay=" + std::to_string(path.relay);
  return text + " numa_node=" + std::to_string(path.numa_node) +
         (is_h2d ? " h2d" : " d2h") + ">";
}

void BindPath(py::module_& module) {
  py::enum_<Direction>(module, "Direction")
      .value("H2D", Direction::kH2d)
      .value("D2H", Direction::kD2h);
  py::class_<Path>(
      module, "Path",
      "Ordered links between a GPU's memory and host memory; relay -1: "
      "direct.")
      .def(py::init([](int gpu, int relay, int numa_node, Direction direction,
                       double bandwidth_bytes_per_s, int64_t latency_ns,
                       std::vector<int> links, int link_group) {
             return Path{gpu,
                         relay,
                         numa_node,
                         direction,
                         bandwidth_bytes_per_s,
                         latency_ns,
                         std::move(links),
                         link_group};
           }),
           py::kw_only(), py::arg("gpu") = 0, py::arg("relay") = topo::kNoRelay,
           py::arg("numa_node") = 0, py::arg("direction") = Direction::kH2d,
           py::arg("bandwidth_bytes_per_s") = 0.0, py::arg("latency_ns") = 0,
           py::arg("links") = std::vector<int>(), py::arg("link_group") = 0)
      .def_readwrite("gpu", &Path::gpu)
      .def_readwrite("relay", &Path::relay)
      .def_readwrite("numa_node", &Path::numa_node)
      .def_readwrite("direction", &Path::direction)
      .def_readwrite("bandwidth_bytes_per_s", &Path::bandwidth_bytes_per_s)
      .def_readwrite("latency_ns", &Path::latency_ns)
      .def_readwrite("links", &Path::links)
      .def_readwrite("link_group", &Path::link_group)
      .def_property_readonly("is_relay", &Path::is_relay)
      .def("__repr__", &Repr);
}

}  // namespace

void BindTopo(py::module_& module) {
  BindPath(module);
  py::class_<topo::Resource>(module, "Resource")
      .def_readonly("name", &topo::Resource::name)
      .def_readonly("bandwidth_bytes_per_s",
                    &topo::Resource::bandwidth_bytes_per_s);
  py::class_<topo::LanePlan>(module, "LanePlan")
      .def_readonly("paths", &topo::LanePlan::paths)
      .def_readonly("caps", &topo::LanePlan::caps)
      .def_readonly("lane_caps", &topo::LanePlan::lane_caps);
  py::class_<Topology>(module, "Topology")
      .def_static(
          "from_json",
          [](const py::bytes& text, const std::string& source) {
            return ValueOrRaise(Topology::FromJson(
                static_cast<std::string_view>(text), source));
          },
          py::arg("text"), py::arg("source"))
      .def("to_json", &Topology::ToJson)
      .def_property_readonly("name",
                             [](const Topology& t) { return t.graph().name; })
      .def_property_readonly(
          "description",
          [](const Topology& t) { return t.graph().description; })
      .def("gpus", &Gpus)
      .def("numa_nodes", &NumaNodes)
      .def("switches", &Switches)
      .def("links", &Links)
      .def("link_groups", &LinkGroups)
      .def("resources", &Topology::resources)
      .def("has_peer_access",
           [](const Topology& t, int a, int b) {
             return t.HasPeerAccess(CheckGpu(t, "a", a), CheckGpu(t, "b", b));
           })
      .def("can_relay",
           [](const Topology& t, int gpu, int relay) {
             return t.CanRelay(CheckGpu(t, "gpu", gpu),
                               CheckGpu(t, "relay", relay));
           })
      .def("paths", &Paths, py::arg("gpu"), py::arg("direction"),
           py::arg("numa_node") = py::none())
      .def("peer_paths", &PeerPaths, py::arg("src"), py::arg("dst"))
      .def("hops", &Hops, py::arg("path"))
      .def("rates", &Rates, py::arg("paths"))
      .def("pooled_bandwidth",
           [](const Topology& t, int gpu, Direction direction) {
             return t.PooledBandwidth(CheckGpu(t, "gpu", gpu), direction);
           })
      .def(
          "lanes",
          [](const Topology& t, std::vector<int> numa_nodes, bool relays,
             bool only_binding_caps) {
            for (const int node : numa_nodes) CheckNuma(t, node);
            return t.Lanes({std::move(numa_nodes), relays, only_binding_caps});
          },
          py::arg("numa_nodes") = std::vector<int>(), py::arg("relays") = true,
          py::arg("only_binding_caps") = true);
  module.def("path_score", &topo::Score, py::arg("bandwidth_bytes_per_s"),
             py::arg("latency_ns"), py::arg("size_bytes"));
}

}  // namespace turbobus::python

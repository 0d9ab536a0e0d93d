#include "topo/graph.h"

namespace turbobus::topo {

std::string_view ToString(LinkType type) {
  switch (type) {
    case LinkType::kPcie:
      return "pcie";
    case LinkType::kNvlink:
      return "nvlink";
    case LinkType::kUpi:
      return "upi";
    case LinkType::kC2c:
      return "c2c";
  }
  return "unknown";
}

std::string_view ToString(SwitchType type) {
  return type == SwitchType::kPcie ? "pcie" : "nvswitch";
}

std::string_view ToString(RateSource source) {
  switch (source) {
    case RateSource::kSpecified:
      return "specified";
    case RateSource::kEstimated:
      return "estimated";
    case RateSource::kMeasured:
      return "measured";
  }
  return "unknown";
}

const std::string& NodeId(const Graph& graph, NodeRef node) {
  switch (node.kind) {
    case NodeKind::kGpu:
      return graph.gpus[node.index].id;
    case NodeKind::kNuma:
      return graph.numa_nodes[node.index].id;
    case NodeKind::kSwitch:
      break;
  }
  return graph.switches[node.index].id;
}

}  // namespace turbobus::topo

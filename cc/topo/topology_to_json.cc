#include "topo/format.h"
#include "topo/json.h"
#include "topo/topology.h"

namespace turbobus::topo {
namespace {

/// One object on one line: files are read and compared by people.
class ObjectWriter {
 public:
  ObjectWriter& String(std::string_view name, std::string_view value) {
    return Raw(name, JsonString(value));
  }
  ObjectWriter& OptionalString(std::string_view name, std::string_view value) {
    return value.empty() ? *this : String(name, value);
  }
  ObjectWriter& Number(std::string_view name, double value) {
    return Raw(name, JsonNumber(value));
  }
  ObjectWriter& OptionalNumber(std::string_view name, double value) {
    return value == 0 ? *this : Number(name, value);
  }
  ObjectWriter& Raw(std::string_view name, std::string_view json) {
    text_ += (text_.empty() ? "" : ", ") + JsonString(name) + ": ";
    text_ += json;
    return *this;
  }
  std::string Finish() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

std::string Lines(const std::vector<std::string>& entries) {
  std::string out = "[";
  for (size_t i = 0; i < entries.size(); ++i) {
    out += (i == 0 ? "\n    " : ",\n    ") + entries[i];
  }
  return out + (entries.empty() ? "]" : "\n  ]");
}

std::string EncodeLink(const Graph& graph, const Link& link) {
  ObjectWriter writer;
  writer.String("id", link.id)
      .String("type", ToString(link.type))
      .String("a", NodeId(graph, link.a))
      .String("b", NodeId(graph, link.b))
      .Number("a_to_b_bytes_per_s", link.a_to_b_bytes_per_s)
      .Number("b_to_a_bytes_per_s", link.b_to_a_bytes_per_s)
      .OptionalNumber("duplex_bytes_per_s", link.duplex_bytes_per_s)
      .OptionalNumber("latency_ns", static_cast<double>(link.latency_ns))
      .OptionalNumber("generation", link.generation)
      .OptionalNumber("max_generation", link.max_generation)
      .OptionalNumber("width", link.width)
      .OptionalNumber("max_width", link.max_width);
  if (link.rate_source != RateSource::kSpecified) {
    writer.String("rate_source", ToString(link.rate_source));
  }
  return writer.Finish();
}

}  // namespace

std::string Topology::ToJson() const {
  std::vector<std::string> numa_nodes;
  for (const NumaNode& node : graph_.numa_nodes) {
    numa_nodes.push_back(
        ObjectWriter()
            .String("id", node.id)
            .OptionalNumber("memory_bytes_per_s", node.memory_bytes_per_s)
            .Finish());
  }
  std::vector<std::string> switches;
  for (const Switch& node : graph_.switches) {
    switches.push_back(ObjectWriter()
                           .String("id", node.id)
                           .String("type", ToString(node.type))
                           .Finish());
  }
  std::vector<std::string> gpus;
  for (const Gpu& gpu : graph_.gpus) {
    gpus.push_back(ObjectWriter()
                       .String("id", gpu.id)
                       .OptionalString("name", gpu.name)
                       .OptionalString("uuid", gpu.uuid)
                       .OptionalString("pci_address", gpu.pci_address)
                       .String("numa_node", graph_.numa_nodes[gpu.numa_node].id)
                       .Finish());
  }
  std::vector<std::string> links;
  for (const Link& link : graph_.links)
    links.push_back(EncodeLink(graph_, link));
  std::vector<std::string> groups;
  for (const LinkGroup& group : graph_.link_groups) {
    std::string ids;
    for (const int gpu : group.gpus) {
      ids += (ids.empty() ? "" : ", ") + JsonString(graph_.gpus[gpu].id);
    }
    groups.push_back(ObjectWriter()
                         .String("id", group.id)
                         .Raw("gpus", "[" + ids + "]")
                         .Number("h2d_bytes_per_s", group.h2d_bytes_per_s)
                         .Number("d2h_bytes_per_s", group.d2h_bytes_per_s)
                         .Finish());
  }
  std::vector<std::string> pairs;
  for (const auto& [a, b] : graph_.peer_access) {
    pairs.push_back("[" + JsonString(graph_.gpus[a].id) + ", " +
                    JsonString(graph_.gpus[b].id) + "]");
  }
  std::string out = "{\n  \"format\": " + JsonString(kFormat);
  out += ",\n  \"version\": " + std::to_string(kVersion);
  out += ",\n  \"name\": " + JsonString(graph_.name);
  if (!graph_.description.empty()) {
    out += ",\n  \"description\": " + JsonString(graph_.description);
  }
  out += ",\n  \"numa_nodes\": " + Lines(numa_nodes);
  if (!switches.empty()) out += ",\n  \"switches\": " + Lines(switches);
  out += ",\n  \"gpus\": " + Lines(gpus);
  out += ",\n  \"links\": " + Lines(links);
  if (!groups.empty()) out += ",\n  \"link_groups\": " + Lines(groups);
  if (graph_.has_peer_access_list)
    out += ",\n  \"peer_access\": " + Lines(pairs);
  return out + "\n}\n";
}

}  // namespace turbobus::topo

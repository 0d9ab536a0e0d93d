#include <map>
#include <optional>

#include "topo/fields.h"
#include "topo/format.h"
#include "topo/json.h"
#include "topo/topology.h"

namespace turbobus::topo {
namespace {

constexpr size_t kMaxFileBytes = 4 << 20;

std::string EntryName(std::string_view list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

/// Builds a graph from a file's value; ids become indices.
class Decoder {
 public:
  StatusOr<Graph> Decode(const JsonValue& root) {
    Fields fields(root, "", error_);
    const std::string format =
        fields.RequiredString("format", "the string \"jax_turbobus/topology\"");
    const int64_t version = Version(fields);
    if (error_.status().ok() && format != kFormat) {
      error_.Set(fields.line(), "format", Quote(kFormat), Quote(format),
                 "this is not a topology file");
    }
    if (error_.status().ok() && version != kVersion) {
      error_.Set(fields.line(), "version", std::to_string(kVersion),
                 std::to_string(version),
                 "the file was written for another release of jax_turbobus");
    }
    // Fields of another version are not judged by this one's rules.
    TB_RETURN_IF_ERROR(error_.status());
    graph_.name = fields.RequiredString("name", "a name for the machine");
    graph_.description = fields.OptionalString("description");
    DecodeNodes(fields);
    DecodeLinks(fields);
    DecodeGroups(fields);
    DecodePeerAccess(fields);
    fields.Finish();
    TB_RETURN_IF_ERROR(error_.status());
    return std::move(graph_);
  }

 private:
  int64_t Version(Fields& fields) {
    if (fields.Required("version", "1") == nullptr) return 0;
    return fields.OptionalInteger("version", 1'000'000);
  }

  void DecodeNodes(Fields& fields) {
    const auto& numa_nodes = fields.Array("numa_nodes", /*is_required=*/true);
    for (size_t i = 0; i < numa_nodes.size(); ++i) {
      Fields entry(numa_nodes[i], EntryName("numa_nodes", i), error_);
      NumaNode& node = graph_.numa_nodes.emplace_back();
      node.id = entry.RequiredString("id", "a name");
      node.memory_bytes_per_s = entry.OptionalRate("memory_bytes_per_s");
      nodes_.emplace(node.id, NodeRef{NodeKind::kNuma, static_cast<int>(i)});
      entry.Finish();
    }
    const auto& switches = fields.Array("switches", /*is_required=*/false);
    for (size_t i = 0; i < switches.size(); ++i) {
      Fields entry(switches[i], EntryName("switches", i), error_);
      Switch& node = graph_.switches.emplace_back();
      node.id = entry.RequiredString("id", "a name");
      node.type =
          entry.Choice("type", {SwitchType::kPcie, SwitchType::kNvswitch},
                       /*is_required=*/true);
      nodes_.emplace(node.id, NodeRef{NodeKind::kSwitch, static_cast<int>(i)});
      entry.Finish();
    }
    const auto& gpus = fields.Array("gpus", /*is_required=*/true);
    for (size_t i = 0; i < gpus.size(); ++i) {
      Fields entry(gpus[i], EntryName("gpus", i), error_);
      Gpu& gpu = graph_.gpus.emplace_back();
      gpu.id = entry.RequiredString("id", "a name");
      gpu.name = entry.OptionalString("name");
      gpu.uuid = entry.OptionalString("uuid");
      gpu.pci_address = entry.OptionalString("pci_address");
      if (const JsonValue* numa = entry.Optional("numa_node")) {
        const std::optional<NodeRef> node =
            FindNode(*numa, entry.Where("numa_node"), NodeKind::kNuma);
        if (node) gpu.numa_node = node->index;
      }
      nodes_.emplace(gpu.id, NodeRef{NodeKind::kGpu, static_cast<int>(i)});
      entry.Finish();
    }
  }

  void DecodeLinks(Fields& fields) {
    const auto& links = fields.Array("links", /*is_required=*/true);
    for (size_t i = 0; i < links.size(); ++i) {
      Fields entry(links[i], EntryName("links", i), error_);
      Link& link = graph_.links.emplace_back();
      link.id = entry.RequiredString("id", "a name");
      link.type = entry.Choice(
          "type",
          {LinkType::kPcie, LinkType::kNvlink, LinkType::kUpi, LinkType::kC2c},
          /*is_required=*/true);
      link.a = LinkEnd(entry, "a");
      link.b = LinkEnd(entry, "b");
      link.a_to_b_bytes_per_s = entry.RequiredRate("a_to_b_bytes_per_s");
      link.b_to_a_bytes_per_s = entry.RequiredRate("b_to_a_bytes_per_s");
      link.duplex_bytes_per_s = entry.OptionalRate("duplex_bytes_per_s");
      link.latency_ns = entry.OptionalInteger("latency_ns", 1'000'000'000);
      link.width = static_cast<int>(entry.OptionalInteger("width", 1024));
      link.max_width =
          static_cast<int>(entry.OptionalInteger("max_width", 1024));
      link.generation =
          static_cast<int>(entry.OptionalInteger("generation", 16));
      link.max_generation =
          static_cast<int>(entry.OptionalInteger("max_generation", 16));
      link.rate_source =
          entry.Choice("rate_source",
                       {RateSource::kSpecified, RateSource::kEstimated,
                        RateSource::kMeasured},
                       /*is_required=*/false);
      entry.Finish();
    }
  }

  void DecodeGroups(Fields& fields) {
    const auto& groups = fields.Array("link_groups", /*is_required=*/false);
    for (size_t i = 0; i < groups.size(); ++i) {
      Fields entry(groups[i], EntryName("link_groups", i), error_);
      LinkGroup& group = graph_.link_groups.emplace_back();
      group.id = entry.RequiredString("id", "a name");
      for (const JsonValue& gpu : entry.Array("gpus", /*is_required=*/true)) {
        const auto node = FindNode(gpu, entry.Where("gpus"), NodeKind::kGpu);
        if (node) group.gpus.push_back(node->index);
      }
      group.h2d_bytes_per_s = entry.RequiredRate("h2d_bytes_per_s");
      group.d2h_bytes_per_s = entry.RequiredRate("d2h_bytes_per_s");
      entry.Finish();
    }
  }

  void DecodePeerAccess(Fields& fields) {
    graph_.has_peer_access_list = fields.Optional("peer_access") != nullptr;
    const auto& pairs = fields.Array("peer_access", /*is_required=*/false);
    for (size_t i = 0; i < pairs.size(); ++i) {
      const std::string where = EntryName("peer_access", i);
      const JsonValue& pair = pairs[i];
      if (pair.type != JsonValue::Type::kArray || pair.array.size() != 2) {
        error_.Set(pair.line, where, "an array of two GPU ids", Describe(pair));
        continue;
      }
      const auto a = FindNode(pair.array[0], where + "[0]", NodeKind::kGpu);
      const auto b = FindNode(pair.array[1], where + "[1]", NodeKind::kGpu);
      if (a && b) graph_.peer_access.emplace_back(a->index, b->index);
    }
  }

  NodeRef LinkEnd(Fields& entry, std::string_view name) {
    const JsonValue* end = entry.Required(name, "the id of a node");
    if (end == nullptr) return {};
    return FindNode(*end, entry.Where(name), std::nullopt).value_or(NodeRef{});
  }

  std::optional<NodeRef> FindNode(const JsonValue& value,
                                  const std::string& where,
                                  std::optional<NodeKind> kind) {
    std::string expected = "the id of a GPU, NUMA node or switch of this file";
    if (kind == NodeKind::kGpu) expected = "the id of a GPU of this file";
    if (kind == NodeKind::kNuma)
      expected = "the id of a NUMA node of this file";
    if (value.type == JsonValue::Type::kString) {
      const auto it = nodes_.find(value.string);
      if (it != nodes_.end() && (!kind || it->second.kind == *kind))
        return it->second;
    }
    error_.Set(value.line, where, expected + KnownIds(kind), Describe(value),
               "correct the id or add the node");
    return std::nullopt;
  }

  /// " (gpu0, gpu1, ...)": what the reader may have meant.
  std::string KnownIds(std::optional<NodeKind> kind) const {
    std::string ids;
    int num_ids = 0;
    for (const auto& [id, node] : nodes_) {
      if (kind && node.kind != *kind) continue;
      if (++num_ids > 12) return " (" + ids + ", ...)";
      const std::string quoted = Quote(id);
      ids += (ids.empty() ? "" : ", ") + quoted.substr(1, quoted.size() - 2);
    }
    return ids.empty() ? "" : " (" + ids + ")";
  }

  FirstError error_;
  Graph graph_;
  std::map<std::string, NodeRef> nodes_;
};

}  // namespace

StatusOr<Topology> Topology::FromJson(std::string_view text,
                                      std::string_view source) {
  const std::string context = "topology " + std::string(source);
  if (text.size() > kMaxFileBytes) {
    return InvalidArgument(context + ": expected at most 4 MiB, got " +
                           std::to_string(text.size()) + " bytes");
  }
  StatusOr<JsonValue> root = ParseJson(text);
  if (!root.ok()) return root.status().WithContext(context);
  StatusOr<Graph> graph = Decoder().Decode(*root);
  if (!graph.ok()) return graph.status().WithContext(context);
  return Create(std::move(graph).value(), source);
}

}  // namespace turbobus::topo

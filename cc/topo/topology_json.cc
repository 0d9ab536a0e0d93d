#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <map>
#include <optional>

#include "topo/json.h"
#include "topo/topology.h"

namespace turbobus::topo {
namespace {

constexpr std::string_view kFormat = "jax_turbobus/topology";
constexpr int kVersion = 1;
constexpr size_t kMaxFileBytes = 4 << 20;

/// The first thing found wrong in a file; later ones are not looked at.
class FirstError {
 public:
  void Set(int line, const std::string& where, std::string_view expected,
           const std::string& got, std::string_view hint = "") {
    if (!status_.ok()) return;
    std::string message = "line " + std::to_string(line) + ": " + where +
                          ": expected " + std::string(expected) + ", got " +
                          got;
    if (!hint.empty()) message += "; " + std::string(hint);
    status_ = InvalidArgument(std::move(message));
  }
  const Status& status() const { return status_; }

 private:
  Status status_;
};

/// Reads the fields of one JSON object. Getters return a default when something
/// is wrong and leave the report in `error`; `Finish` refuses what nobody read.
class Fields {
 public:
  Fields(const JsonValue& value, std::string where, FirstError& error)
      : value_(value), where_(std::move(where)), error_(error) {
    if (value.type != JsonValue::Type::kObject) {
      error_.Set(value.line, where_.empty() ? "the file" : where_, "an object",
                 Describe(value));
    }
  }

  const JsonValue* Optional(std::string_view name) {
    known_.emplace_back(name);
    return value_.Find(name);
  }

  const JsonValue* Required(std::string_view name, std::string_view expected) {
    const JsonValue* field = Optional(name);
    if (field == nullptr) {
      error_.Set(value_.line, Where(name), expected, "no such field", "add it");
    }
    return field;
  }

  std::string RequiredString(std::string_view name, std::string_view expected) {
    const JsonValue* field = Required(name, expected);
    return field == nullptr ? "" : String(*field, Where(name), expected);
  }

  std::string OptionalString(std::string_view name) {
    const JsonValue* field = Optional(name);
    return field == nullptr ? "" : String(*field, Where(name), "a string");
  }

  std::string String(const JsonValue& value, const std::string& where,
                     std::string_view expected) {
    if (value.type != JsonValue::Type::kString) {
      error_.Set(value.line, where, expected, Describe(value));
      return "";
    }
    if (value.string.find('\0') != std::string::npos) {
      error_.Set(value.line, where, "text", "a NUL character in it");
    }
    return value.string;
  }

  double RequiredRate(std::string_view name) {
    const JsonValue* field = Required(name, kRate);
    return field == nullptr ? 0 : Rate(*field, name);
  }

  double OptionalRate(std::string_view name) {
    const JsonValue* field = Optional(name);
    return field == nullptr ? 0 : Rate(*field, name);
  }

  int64_t OptionalInteger(std::string_view name, int64_t limit) {
    const JsonValue* field = Optional(name);
    if (field == nullptr) return 0;
    const double number = field->number;
    const bool is_good = field->type == JsonValue::Type::kNumber &&
                         number >= 0 && number <= static_cast<double>(limit) &&
                         number == std::floor(number);
    if (is_good) return static_cast<int64_t>(number);
    error_.Set(field->line, Where(name),
               "a whole number from 0 to " + std::to_string(limit),
               Describe(*field));
    return 0;
  }

  /// One of `choices`, spelt as `ToString` spells it.
  template <typename Enum>
  Enum Choice(std::string_view name, std::initializer_list<Enum> choices,
              bool is_required) {
    std::string expected = "one of";
    for (const Enum choice : choices) {
      expected += ' ';
      expected += Quote(ToString(choice));
    }
    const JsonValue* field =
        is_required ? Required(name, expected) : Optional(name);
    if (field == nullptr) return *choices.begin();
    if (field->type == JsonValue::Type::kString) {
      for (const Enum choice : choices) {
        if (field->string == ToString(choice)) return choice;
      }
    }
    error_.Set(field->line, Where(name), expected, Describe(*field));
    return *choices.begin();
  }

  /// The elements of an array, or none; null elements never occur.
  const std::vector<JsonValue>& Array(std::string_view name, bool is_required) {
    static const std::vector<JsonValue>& none = *new std::vector<JsonValue>();
    const JsonValue* field =
        is_required ? Required(name, "an array") : Optional(name);
    if (field == nullptr) return none;
    if (field->type != JsonValue::Type::kArray) {
      error_.Set(field->line, Where(name), "an array", Describe(*field));
      return none;
    }
    return field->array;
  }

  /// Reports a field that was never asked for: a misspelt name would otherwise
  /// be taken as a missing optional one.
  void Finish() {
    for (const auto& [name, value] : value_.object) {
      if (std::find(known_.begin(), known_.end(), name) != known_.end())
        continue;
      std::string names;
      for (const std::string& known : known_) {
        names += (names.empty() ? "" : ", ") + known;
      }
      error_.Set(value.line, Where(name), "only the fields " + names,
                 "the field " + Quote(name), "correct its name or remove it");
    }
  }

  std::string Where(std::string_view name) const {
    return where_.empty() ? std::string(name)
                          : where_ + "." + std::string(name);
  }
  int line() const { return value_.line; }

 private:
  static constexpr std::string_view kRate = "bytes per second, above 0";

  double Rate(const JsonValue& field, std::string_view name) {
    if (field.type == JsonValue::Type::kNumber && field.number > 0) {
      return field.number;
    }
    error_.Set(field.line, Where(name), kRate, Describe(field));
    return 0;
  }

  const JsonValue& value_;
  std::string where_;
  FirstError& error_;
  std::vector<std::string> known_;
};

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

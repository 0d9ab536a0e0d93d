#include "python/cuda/settings.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace turbobus::python {
namespace {

namespace py = pybind11;
using engine::StreamSettings;

// Values of enums, in their order.
constexpr const char* kSplits[] = {"finish-time", "even", "direct"};
constexpr const char* kRelayStreams[] = {"leg", "slot", "loose-slot"};

/// Calls `visit(name, member)` for each setting; an enum's has a third
/// argument, the names of its values.
template <typename Visit>
void ForEach(StreamSettings& settings, Visit visit) {
  visit("block_bytes", settings.block_bytes);
  visit("min_pooled_bytes", settings.min_pooled_bytes);
  visit("split", settings.split, kSplits);
  visit("is_lock_step", settings.is_lock_step);
  visit("has_yields", settings.has_yields);
  visit("late_factor", settings.late_factor);
  visit("direct_latency_ns", settings.direct_latency_ns);
  visit("relay_latency_ns", settings.relay_latency_ns);
  visit("is_disabled", settings.is_disabled);
  visit("is_traced", settings.is_traced);
  visit("relay_streams", settings.relay_streams, kRelayStreams);
}

/// Takes settings out of a dict.
struct Reader {
  py::dict& values;

  template <typename T>
  void operator()(const char* name, T& into) {
    if (!values.contains(name)) return;
    into = values.attr("pop")(name).cast<T>();
  }

  template <typename Enum, size_t kSize>
  void operator()(const char* name, Enum& into,
                  const char* const (&names)[kSize]) {
    if (!values.contains(name)) return;
    const auto value = values.attr("pop")(name).cast<std::string>();
    const auto* const found = std::ranges::find(names, value);
    if (found == std::end(names)) {
      std::string known;
      for (const char* const one : names) {
        known += (known.empty() ? "'" : ", '") + std::string(one) + "'";
      }
      throw py::value_error(std::string(name) + ": expected one of " + known +
                            ", got '" + value + "'");
    }
    into = static_cast<Enum>(found - std::begin(names));
  }
};

struct Writer {
  py::dict& values;

  template <typename T>
  void operator()(const char* name, T value) {
    values[name] = value;
  }

  template <typename Enum, size_t kSize>
  void operator()(const char* name, Enum value,
                  const char* const (&names)[kSize]) {
    values[name] = names[static_cast<size_t>(value)];
  }
};

}  // namespace

StreamSettings Changed(StreamSettings settings, const py::dict& values) {
  py::dict left = values.attr("copy")();
  ForEach(settings, Reader{left});
  for (const auto& [name, value] : left) {
    throw py::value_error("no setting is called '" + name.cast<std::string>() +
                          "'");
  }
  return settings;
}

py::dict ToDict(StreamSettings settings) {
  py::dict values;
  ForEach(settings, Writer{values});
  return values;
}

}  // namespace turbobus::python

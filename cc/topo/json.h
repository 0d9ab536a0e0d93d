#ifndef TURBOBUS_TOPO_JSON_H_
#define TURBOBUS_TOPO_JSON_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace turbobus::topo {

/// One value of a JSON text, and the line on which it starts.
struct JsonValue {
  enum class Type : uint8_t {
    kNull,
    kBool,
    kNumber,
    kString,
    kArray,
    kObject,
  };

  Type type = Type::kNull;
  bool boolean = false;
  double number = 0;
  std::string string;
  std::vector<JsonValue> array;
  /// Members in the order of the text; no name occurs twice.
  std::vector<std::pair<std::string, JsonValue>> object;
  int line = 1;

  /// The member called `name`, or null.
  const JsonValue* Find(std::string_view name) const;
};

/// The value as an error message shows it: "-1", "a string \"x\"", "an array".
std::string Describe(const JsonValue& value);

/// `text` in double quotes, escaped to printable ASCII and cut after 60 bytes.
std::string Quote(std::string_view text);

/// Reads RFC 8259 JSON and nothing more: no comments, no trailing commas, no
/// NaN, no number that overflows a double, no name twice in an object, UTF-8
/// only, at most 32 levels deep. INVALID_ARGUMENT names the line and column.
StatusOr<JsonValue> ParseJson(std::string_view text);

/// `text` as a JSON string literal (it must be UTF-8).
std::string JsonString(std::string_view text);

/// The shortest literal that reads back as `number`, which must be finite.
std::string JsonNumber(double number);

}  // namespace turbobus::topo

#endif  // TURBOBUS_TOPO_JSON_H_

#ifndef TURBOBUS_TOPO_FIELDS_H_
#define TURBOBUS_TOPO_FIELDS_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "topo/graph.h"
#include "topo/json.h"

namespace turbobus::topo {

/// The first thing found wrong in a file; later ones are not looked at.
class FirstError {
 public:
  void Set(int line, const std::string& where, std::string_view expected,
           const std::string& got, std::string_view hint = "");
  const Status& status() const { return status_; }

 private:
  Status status_;
};

/// Reads the fields of one JSON object, strictly.
///
/// Getters return a default when something is wrong and leave the report, which
/// names the field as `where`.name, in `error`. Borrows `value` and `error`. An
/// `Optional` field that is absent is zero or empty; a JSON null is not absent.
class Fields {
 public:
  Fields(const JsonValue& value, std::string where, FirstError& error);

  /// The field, or null if there is none.
  const JsonValue* Optional(std::string_view name);
  const JsonValue* Required(std::string_view name, std::string_view expected);

  std::string RequiredString(std::string_view name, std::string_view expected);
  std::string OptionalString(std::string_view name);

  /// Bytes per second, above 0.
  double RequiredRate(std::string_view name);
  double OptionalRate(std::string_view name);

  /// A whole number from 0 to `limit`.
  int64_t OptionalInteger(std::string_view name, int64_t limit);

  /// One of `choices`, spelt as `ToString` spells it; the first by default.
  template <typename Enum>
  Enum Choice(std::string_view name, std::initializer_list<Enum> choices,
              bool is_required) {
    std::vector<std::string_view> words;
    for (const Enum choice : choices) words.push_back(ToString(choice));
    return *(choices.begin() + Word(name, words, is_required));
  }

  /// The elements of an array field, or none.
  const std::vector<JsonValue>& Array(std::string_view name, bool is_required);

  /// Reports a field that no getter asked for: a misspelt name would otherwise
  /// pass for an absent optional one.
  void Finish();

  /// The field's name as messages give it.
  std::string Where(std::string_view name) const;
  int line() const { return value_.line; }

 private:
  std::string String(const JsonValue& value, const std::string& where,
                     std::string_view expected);
  double Rate(const JsonValue& field, std::string_view name);
  /// The index in `words` of the field's value; 0 if something is wrong.
  size_t Word(std::string_view name, const std::vector<std::string_view>& words,
              bool is_required);

  const JsonValue& value_;
  std::string where_;
  FirstError& error_;
  std::vector<std::string> known_;
};

}  // namespace turbobus::topo

#endif  // TURBOBUS_TOPO_FIELDS_H_

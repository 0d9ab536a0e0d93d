#include "topo/fields.h"

#include <algorithm>
#include <cmath>

namespace turbobus::topo {
namespace {

constexpr std::string_view kRate = "bytes per second, above 0";

}  // namespace

void FirstError::Set(int line, const std::string& where,
                     std::string_view expected, const std::string& got,
                     std::string_view hint) {
  if (!status_.ok()) return;
  std::string message = "line " + std::to_string(line) + ": " + where +
                        ": expected " + std::string(expected) + ", got " + got;
  if (!hint.empty()) message += "; " + std::string(hint);
  status_ = InvalidArgument(std::move(message));
}

Fields::Fields(const JsonValue& value, std::string where, FirstError& error)
    : value_(value), where_(std::move(where)), error_(error) {
  if (value.type != JsonValue::Type::kObject) {
    error_.Set(value.line, where_.empty() ? "the file" : where_, "an object",
               Describe(value));
  }
}

const JsonValue* Fields::Optional(std::string_view name) {
  known_.emplace_back(name);
  return value_.Find(name);
}

const JsonValue* Fields::Required(std::string_view name,
                                  std::string_view expected) {
  const JsonValue* field = Optional(name);
  if (field == nullptr) {
    error_.Set(value_.line, Where(name), expected, "no such field", "add it");
  }
  return field;
}

std::string Fields::RequiredString(std::string_view name,
                                   std::string_view expected) {
  const JsonValue* field = Required(name, expected);
  return field == nullptr ? "" : String(*field, Where(name), expected);
}

std::string Fields::OptionalString(std::string_view name) {
  const JsonValue* field = Optional(name);
  return field == nullptr ? "" : String(*field, Where(name), "a string");
}

std::string Fields::String(const JsonValue& value, const std::string& where,
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

double Fields::RequiredRate(std::string_view name) {
  const JsonValue* field = Required(name, kRate);
  return field == nullptr ? 0 : Rate(*field, name);
}

double Fields::OptionalRate(std::string_view name) {
  const JsonValue* field = Optional(name);
  return field == nullptr ? 0 : Rate(*field, name);
}

double Fields::Rate(const JsonValue& field, std::string_view name) {
  if (field.type == JsonValue::Type::kNumber && field.number > 0)
    return field.number;
  error_.Set(field.line, Where(name), kRate, Describe(field));
  return 0;
}

int64_t Fields::OptionalInteger(std::string_view name, int64_t limit) {
  const JsonValue* field = Optional(name);
  if (field == nullptr) return 0;
  const double number = field->number;
  const bool is_good = field->type == JsonValue::Type::kNumber && number >= 0 &&
                       number <= static_cast<double>(limit) &&
                       number == std::floor(number);
  if (is_good) return static_cast<int64_t>(number);
  error_.Set(field->line, Where(name),
             "a whole number from 0 to " + std::to_string(limit),
             Describe(*field));
  return 0;
}

size_t Fields::Word(std::string_view name,
                    const std::vector<std::string_view>& words,
                    bool is_required) {
  std::string expected = "one of";
  for (const std::string_view word : words) {
    expected += ' ';
    expected += Quote(word);
  }
  const JsonValue* field =
      is_required ? Required(name, expected) : Optional(name);
  if (field == nullptr) return 0;
  if (field->type == JsonValue::Type::kString) {
    const auto it = std::find(words.begin(), words.end(), field->string);
    if (it != words.end()) return static_cast<size_t>(it - words.begin());
  }
  error_.Set(field->line, Where(name), expected, Describe(*field));
  return 0;
}

const std::vector<JsonValue>& Fields::Array(std::string_view name,
                                            bool is_required) {
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

void Fields::Finish() {
  for (const auto& [name, value] : value_.object) {
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    std::string names;
    for (const std::string& known : known_) {
      names += (names.empty() ? "" : ", ") + known;
    }
    error_.Set(value.line, Where(name), "only the fields " + names,
               "the field " + Quote(name), "correct its name or remove it");
  }
}

std::string Fields::Where(std::string_view name) const {
  return where_.empty() ? std::string(name) : where_ + "." + std::string(name);
}

}  // namespace turbobus::topo

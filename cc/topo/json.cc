#include "topo/json.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <optional>
#include <system_error>

#include "topo/utf8.h"

namespace turbobus::topo {
namespace {

constexpr int kMaxDepth = 32;
constexpr size_t kMaxQuotedBytes = 60;

/// Recursive descent; stops at the first error.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  StatusOr<JsonValue> Parse() {
    JsonValue value;
    SkipSpace();
    TB_RETURN_IF_ERROR(ReadValue(value, 0));
    SkipSpace();
    if (!AtEnd()) return Error("the end of the file");
    return value;
  }

 private:
  bool AtEnd() const { return position_ >= text_.size(); }
  char Peek() const { return text_[position_]; }

  bool Take(char wanted) {
    if (AtEnd() || Peek() != wanted) return false;
    ++position_;
    return true;
  }

  bool TakeWord(std::string_view word) {
    if (!text_.substr(position_).starts_with(word)) return false;
    position_ += word.size();
    return true;
  }

  void SkipSpace() {
    while (!AtEnd()) {
      const char c = Peek();
      if (c == '\n') {
        ++line_;
        line_start_ = position_ + 1;
      } else if (c != ' ' && c != '\t' && c != '\r') {
        return;
      }
      ++position_;
    }
  }

  Status Error(std::string_view expected) const {
    std::string found = "the end of the file (is it cut short?)";
    if (!AtEnd()) found = Quote(text_.substr(position_, 12));
    return Fault("expected " + std::string(expected) + ", got " + found);
  }

  Status Fault(const std::string& message) const {
    return InvalidArgument("line " + std::to_string(line_) + ", column " +
                           std::to_string(position_ - line_start_ + 1) + ": " +
                           message);
  }

  Status ReadValue(JsonValue& value, int depth) {
    if (depth > kMaxDepth) return Fault("nested more than 32 levels deep");
    if (AtEnd()) return Error("a value");
    value.line = line_;
    switch (Peek()) {
      case '{':
        return ReadObject(value, depth);
      case '[':
        return ReadArray(value, depth);
      case '"':
        value.type = JsonValue::Type::kString;
        return ReadString(value.string);
      default:
        break;
    }
    if (TakeWord("true") || TakeWord("false")) {
      value.type = JsonValue::Type::kBool;
      value.boolean = text_[position_ - 2] == 'u';
      return OkStatus();
    }
    if (TakeWord("null")) return OkStatus();
    return ReadNumber(value);
  }

  Status ReadObject(JsonValue& value, int depth) {
    value.type = JsonValue::Type::kObject;
    Take('{');
    SkipSpace();
    if (Take('}')) return OkStatus();
    while (true) {
      if (AtEnd() || Peek() != '"')
        return Error("a field name in double quotes");
      std::string name;
      TB_RETURN_IF_ERROR(ReadString(name));
      if (value.Find(name) != nullptr) {
        return Fault("field " + Quote(name) + " occurs twice in one object");
      }
      SkipSpace();
      if (!Take(':')) return Error("':'");
      SkipSpace();
      JsonValue member;
      TB_RETURN_IF_ERROR(ReadValue(member, depth + 1));
      value.object.emplace_back(std::move(name), std::move(member));
      SkipSpace();
      if (Take('}')) return OkStatus();
      if (!Take(',')) return Error("',' or '}'");
      SkipSpace();
    }
  }

  Status ReadArray(JsonValue& value, int depth) {
    value.type = JsonValue::Type::kArray;
    Take('[');
    SkipSpace();
    if (Take(']')) return OkStatus();
    while (true) {
      JsonValue element;
      TB_RETURN_IF_ERROR(ReadValue(element, depth + 1));
      value.array.push_back(std::move(element));
      SkipSpace();
      if (Take(']')) return OkStatus();
      if (!Take(',')) return Error("',' or ']'");
      SkipSpace();
    }
  }

  Status ReadString(std::string& out) {
    Take('"');
    while (true) {
      if (AtEnd()) return Error("'\"' at the end of a string");
      if (Take('"')) return OkStatus();
      if (static_cast<uint8_t>(Peek()) < 0x20) {
        return Error("no control character in a string");
      }
      if (Take('\\')) {
        TB_RETURN_IF_ERROR(ReadEscape(out));
        continue;
      }
      const size_t length = Utf8SequenceLength(text_.substr(position_));
      if (length == 0) return Error("UTF-8 text");
      out.append(text_.substr(position_, length));
      position_ += length;
    }
  }

  Status ReadEscape(std::string& out) {
    constexpr std::string_view kFrom = "\"\\/bfnrt";
    constexpr std::string_view kTo = "\"\\/\b\f\n\r\t";
    if (AtEnd()) return Error("an escape");
    if (const size_t i = kFrom.find(Peek()); i != std::string_view::npos) {
      ++position_;
      out += kTo[i];
      return OkStatus();
    }
    if (!Take('u')) return Error("an escape such as \\n or \\u00e9");
    std::optional<uint32_t> code = ReadHex4();
    if (!code) return Error("four hexadecimal digits");
    if (*code >= 0xD800 && *code <= 0xDFFF) {
      const bool is_pair = *code < 0xDC00 && Take('\\') && Take('u');
      const std::optional<uint32_t> low = is_pair ? ReadHex4() : std::nullopt;
      if (!low || *low < 0xDC00 || *low > 0xDFFF) {
        return Error("a pair of surrogates");
      }
      code = 0x10000 + ((*code - 0xD800) << 10) + (*low - 0xDC00);
    }
    AppendUtf8(*code, out);
    return OkStatus();
  }

  std::optional<uint32_t> ReadHex4() {
    if (text_.size() - position_ < 4) return std::nullopt;
    uint32_t code = 0;
    const char* begin = text_.data() + position_;
    const auto [end, error] = std::from_chars(begin, begin + 4, code, 16);
    if (error != std::errc() || end != begin + 4) return std::nullopt;
    position_ += 4;
    return code;
  }

  /// from_chars takes more than JSON does (leading zeros, "inf"), so the shape
  /// is checked first.
  Status ReadNumber(JsonValue& value) {
    const size_t start = position_;
    const auto take_digits = [&] {
      const size_t first = position_;
      while (!AtEnd() && Peek() >= '0' && Peek() <= '9') ++position_;
      return position_ > first;
    };
    Take('-');
    const bool has_leading_zero = !AtEnd() && Peek() == '0';
    const size_t first_digit = position_;
    bool is_number = take_digits();
    if (has_leading_zero && position_ - first_digit > 1) is_number = false;
    if (is_number && Take('.')) is_number = take_digits();
    if (is_number && (Take('e') || Take('E'))) {
      if (!Take('+')) Take('-');
      is_number = take_digits();
    }
    if (!is_number) {
      position_ = start;
      return Error("a value (NaN and Infinity are not JSON)");
    }
    value.type = JsonValue::Type::kNumber;
    const auto [end, error] = std::from_chars(
        text_.data() + start, text_.data() + position_, value.number);
    if (error == std::errc::result_out_of_range) {
      const std::string literal = Quote(text_.substr(start, position_ - start));
      position_ = start;
      return Fault("the number " + literal + " does not fit a double");
    }
    return OkStatus();
  }

  std::string_view text_;
  size_t position_ = 0;
  size_t line_start_ = 0;
  int line_ = 1;
};

}  // namespace

const JsonValue* JsonValue::Find(std::string_view name) const {
  for (const auto& [key, value] : object) {
    if (key == name) return &value;
  }
  return nullptr;
}

std::string Describe(const JsonValue& value) {
  switch (value.type) {
    case JsonValue::Type::kNull:
      return "null";
    case JsonValue::Type::kBool:
      return value.boolean ? "true" : "false";
    case JsonValue::Type::kNumber:
      return JsonNumber(value.number);
    case JsonValue::Type::kString:
      return "the string " + Quote(value.string);
    case JsonValue::Type::kArray:
      return "an array of " + std::to_string(value.array.size());
    case JsonValue::Type::kObject:
      return "an object";
  }
  return "something else";
}

std::string Quote(std::string_view text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == kMaxQuotedBytes) return out + "...\"";
    const char c = text[i];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c >= 0x20 && c < 0x7F) {
      out += c;
    } else {
      std::array<char, 8> escape;
      std::snprintf(escape.data(), escape.size(), "\\x%02x",
                    static_cast<unsigned>(static_cast<uint8_t>(c)));
      out += escape.data();
    }
  }
  return out + '"';
}

StatusOr<JsonValue> ParseJson(std::string_view text) {
  return Parser(text).Parse();
}

std::string JsonString(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<uint8_t>(c) >= 0x20) {
      out += c;
    } else {
      std::array<char, 8> escape;
      std::snprintf(escape.data(), escape.size(), "\\u%04x",
                    static_cast<unsigned>(c));
      out += escape.data();
    }
  }
  return out + '"';
}

std::string JsonNumber(double number) {
  std::array<char, 40> buffer;
  // Whole numbers read better without an exponent: 55300000000, not 5.53e+10.
  const bool is_whole = std::abs(number) < 1e15 && number == std::floor(number);
  const auto [end, error] =
      is_whole
          ? std::to_chars(buffer.data(), buffer.data() + buffer.size(),
                          static_cast<int64_t>(number))
          : std::to_chars(buffer.data(), buffer.data() + buffer.size(), number);
  return {buffer.data(), end};
}

}  // namespace turbobus::topo

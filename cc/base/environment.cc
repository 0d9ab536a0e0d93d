#include "base/environment.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <string_view>

namespace turbobus {
namespace {

using Words = std::array<std::string_view, 4>;
constexpr Words kOn = {"1", "true", "yes", "on"};
constexpr Words kOff = {"0", "false", "no", "off"};

bool IsOneOf(const Words& words, std::string_view text) {
  return std::ranges::find(words, text) != words.end();
}

}  // namespace

std::string EnvironmentText(const char* variable) {
  const char* const value = std::getenv(variable);
  std::string text = value == nullptr ? "" : value;
  constexpr char kSpace[] = " \t\n\v\f\r";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

std::string EnvironmentWord(const char* variable) {
  std::string text = EnvironmentText(variable);
  for (char& c : text) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

bool IsSwitchedOff(const char* variable) {
  return IsOneOf(kOff, EnvironmentWord(variable));
}

Status CheckSwitch(const char* variable) {
  const std::string word = EnvironmentWord(variable);
  if (word.empty() || IsOneOf(kOn, word) || IsOneOf(kOff, word)) {
    return OkStatus();
  }
  return InvalidArgument(std::string(variable) + ": expected 1 or 0, got '" +
                         EnvironmentText(variable) + "'");
}

}  // namespace turbobus

#include "base/environment.h"

#include <cctype>
#include <cstdlib>

namespace turbobus {

std::string EnvironmentText(const char* variable) {
  const char* const value = std::getenv(variable);
  std::string text = value == nullptr ? "" : value;
  constexpr char kSpace[] = " \t\n\v\f\r";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

bool IsSwitchedOff(const char* variable) {
  std::string text = EnvironmentText(variable);
  for (char& c : text) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text == "0" || text == "false" || text == "no" || text == "off";
}

}  // namespace turbobus

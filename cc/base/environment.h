#ifndef TURBOBUS_BASE_ENVIRONMENT_H_
#define TURBOBUS_BASE_ENVIRONMENT_H_

#include <string>

#include "base/status.h"

namespace turbobus {

/// The value of an environment variable without the space around it; empty if
/// it is not set, which is the same. Not while another thread changes the
/// environment.
std::string EnvironmentText(const char* variable);

/// The same in lower case.
std::string EnvironmentWord(const char* variable);

/// Whether an environment variable switches something off that is on: 0, false,
/// no or off, in any case, as for switches that Python reads.
bool IsSwitchedOff(const char* variable);

/// INVALID_ARGUMENT, naming the variable, if it is set to what is neither on
/// (1, true, yes, on) nor off; as Python refuses it.
Status CheckSwitch(const char* variable);

}  // namespace turbobus

#endif  // TURBOBUS_BASE_ENVIRONMENT_H_

#include "base/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace turbobus {
namespace {

constexpr char kVariable[] = "JAX_TURBOBUS_ENVIRONMENT_TEST";

TEST(EnvironmentTest, SpaceAroundAValueIsNoPartOfIt) {
  unsetenv(kVariable);
  EXPECT_EQ(EnvironmentText(kVariable), "");
  for (const char* const empty : {"", " ", " \t\n"}) {
    setenv(kVariable, empty, 1);
    EXPECT_EQ(EnvironmentText(kVariable), "");
  }
  setenv(kVariable, " 4 MiB\n", 1);
  EXPECT_EQ(EnvironmentText(kVariable), "4 MiB");
  unsetenv(kVariable);
}

TEST(EnvironmentTest, AWordHasNoCapitals) {
  setenv(kVariable, " CUDA_Async ", 1);
  EXPECT_EQ(EnvironmentWord(kVariable), "cuda_async");
  unsetenv(kVariable);
}

TEST(EnvironmentTest, OffIsWhatPythonTakesForOff) {
  unsetenv(kVariable);
  EXPECT_FALSE(IsSwitchedOff(kVariable));
  for (const char* const off : {"0", " 0 ", "false", "No", "OFF\n"}) {
    setenv(kVariable, off, 1);
    EXPECT_TRUE(IsSwitchedOff(kVariable)) << off;
  }
  for (const char* const on : {"", " ", "1", "yes", "00", "2"}) {
    setenv(kVariable, on, 1);
    EXPECT_FALSE(IsSwitchedOff(kVariable)) << on;
  }
  unsetenv(kVariable);
}

TEST(EnvironmentTest, WordsThatAreNoSwitchAreRefusedByName) {
  unsetenv(kVariable);
  EXPECT_EQ(CheckSwitch(kVariable), OkStatus());
  for (const char* const word :
       {"", " ", "1", " On ", "TRUE", "yes", "0", "no", "False", "off\n"}) {
    setenv(kVariable, word, 1);
    EXPECT_EQ(CheckSwitch(kVariable), OkStatus()) << word;
  }
  for (const char* const word : {"2", "none", "-1", "00", "offf"}) {
    setenv(kVariable, word, 1);
    EXPECT_EQ(CheckSwitch(kVariable),
              InvalidArgument(std::string(kVariable) +
                              ": expected 1 or 0, got '" + word + "'"));
  }
  unsetenv(kVariable);
}

}  // namespace
}  // namespace turbobus

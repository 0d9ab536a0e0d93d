#include "base/status.h"

#include <gtest/gtest.h>

namespace turbobus {
namespace {

StatusOr<int> Half(int n) {
  if (n % 2 != 0) return InvalidArgument("n: expected an even number");
  return n / 2;
}

StatusOr<int> Quarter(int n) {
  TB_ASSIGN_OR_RETURN(int half, Half(n));
  return Half(half);
}

TEST(StatusTest, AssignOrReturnPassesValuesAndErrorsOn) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(6).status(), InvalidArgument("n: expected an even number"));
}

TEST(StatusTest, ContextIsPutInFrontOfTheMessageAndOkStaysOk) {
  EXPECT_EQ(Internal("lost").WithContext("lane 3").message(), "lane 3: lost");
  EXPECT_TRUE(OkStatus().WithContext("lane 3").ok());
}

}  // namespace
}  // namespace turbobus

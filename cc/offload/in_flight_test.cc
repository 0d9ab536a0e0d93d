#include "offload/in_flight.h"

#include <gtest/gtest.h>

namespace turbobus::offload {
namespace {

std::shared_ptr<StagedTransfer> Some() {
  return StagedTransfer::Start(topo::Direction::kH2d, 0, {});
}

TEST(InFlight, FindsATransferByDeviceBufferAndRun) {
  InFlight table;
  int a = 0;
  int b = 0;
  const auto transfer = Some();
  table.Insert(0, &a, 7, transfer);
  EXPECT_EQ(table.Take(0, &b, 7), nullptr);
  EXPECT_EQ(table.Take(1, &a, 7), nullptr);
  EXPECT_EQ(table.Take(0, &a, 8), nullptr);
  EXPECT_EQ(table.Take(0, &a, 7), transfer);
  EXPECT_EQ(table.Take(0, &a, 7), nullptr);
  EXPECT_EQ(table.size(), 0u);
}

TEST(InFlight, GivesTheOldestOfSeveralForOneBuffer) {
  InFlight table;
  int a = 0;
  const auto first = Some();
  const auto second = Some();
  table.Insert(0, &a, 7, first);
  table.Insert(0, &a, 7, second);
  EXPECT_EQ(table.Take(0, &a, 7), first);
  EXPECT_EQ(table.Take(0, &a, 7), second);
}

TEST(InFlight, DropsWhatAnEarlierRunLeftAtTheSameAddress) {
  InFlight table;
  int a = 0;
  table.Insert(0, &a, 7, Some());
  const auto later = Some();
  table.Insert(0, &a, 8, later);
  EXPECT_EQ(table.size(), 1u);
  EXPECT_EQ(table.Take(0, &a, 8), later);
}

TEST(InFlight, ForgetsARunOnOneDevice) {
  InFlight table;
  int a = 0;
  int b = 0;
  table.Insert(0, &a, 7, Some());
  table.Insert(0, &b, 7, Some());
  table.Insert(0, &b, 8, Some());  // drops that of run 7
  table.Insert(1, &a, 7, Some());
  table.DropRun(0, 7);
  EXPECT_EQ(table.size(), 2u);
  EXPECT_NE(table.Take(0, &b, 8), nullptr);
  EXPECT_NE(table.Take(1, &a, 7), nullptr);
}

}  // namespace
}  // namespace turbobus::offload

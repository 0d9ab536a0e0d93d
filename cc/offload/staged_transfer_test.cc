#include "offload/staged_transfer.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "offload/manual_engine.h"

namespace turbobus::offload {
namespace {

using topo::Direction;

TEST(StagedTransfer, IsInPlaceWhenStartReturnsWithoutAnEngine) {
  const std::string from = "in place";
  std::string to(from.size(), '.');
  const auto staged =
      StagedTransfer::Start(Direction::kH2d, 0, {{from.data(), to.data(), 8}});
  EXPECT_EQ(staged->transfer()->outcome(), OkStatus());
  EXPECT_EQ(to, from);
  staged->Land();
  EXPECT_EQ(to, from);
}

TEST(StagedTransfer, LandsWhenAskedTo) {
  ManualEngine engine;
  const std::string from = "abcdefgh";
  std::string to(from.size(), '.');
  // Two pieces, swapped.
  const auto staged = StagedTransfer::Start(
      Direction::kH2d, 0,
      {{from.data(), to.data() + 4, 4}, {from.data() + 4, to.data(), 4}});
  engine.FinishNext();
  EXPECT_EQ(to, "........");
  EXPECT_EQ(staged->transfer()->Wait(), OkStatus());
  staged->Land();
  EXPECT_EQ(to, "efghabcd");
}

TEST(StagedTransfer, TouchesNoMemoryOfAProgramThatFailed) {
  ManualEngine engine;
  auto from = std::make_unique<std::string>(1 << 16, 'x');
  auto to = std::make_unique<std::string>(1 << 16, '.');
  auto staged = StagedTransfer::Start(Direction::kH2d, 0,
                                      {{from->data(), to->data(), 1 << 16}});
  // The program's buffers go, and nobody asks for the transfer any more: under
  // the address sanitizer the engine's copy would be caught.
  from.reset();
  to.reset();
  staged.reset();
  engine.FinishNext();
}

}  // namespace
}  // namespace turbobus::offload

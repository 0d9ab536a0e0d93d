#include "offload/transfer.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "offload/manual_engine.h"

namespace turbobus::offload {
namespace {

using topo::Direction;

std::vector<char> Bytes(size_t size) {
  std::vector<char> bytes(size);
  std::iota(bytes.begin(), bytes.end(), 1);
  return bytes;
}

Piece Whole(const std::vector<char>& from, std::vector<char>& to) {
  return {from.data(), to.data(), static_cast<int64_t>(from.size())};
}

TEST(Transfer, IsOverWhenStartReturnsWithoutAnEngine) {
  const auto from = Bytes(5 << 20);  // large enough to stream past the caches
  std::vector<char> to(from.size());
  const auto transfer = Transfer::Start(Direction::kH2d, 0, {Whole(from, to)});
  EXPECT_EQ(transfer->outcome(), OkStatus());
  EXPECT_EQ(to, from);
}

TEST(Transfer, OfNoBytesAsksNoEngine) {
  ManualEngine engine;
  const auto transfer = Transfer::Start(Direction::kH2d, 0, {{}});
  EXPECT_EQ(transfer->outcome(), OkStatus());
  EXPECT_EQ(engine.num_requests(), 0u);
}

TEST(Transfer, EndsWithItsLastPiece) {
  ManualEngine engine;
  const auto from = Bytes(64);
  std::vector<char> to(64);
  const auto transfer = Transfer::Start(
      Direction::kH2d, 0,
      {{from.data(), to.data(), 32}, {from.data() + 32, to.data() + 32, 32}});
  std::optional<Status> outcome;
  transfer->OnDone([&](const Status& status) { outcome = status; });
  engine.FinishNext();
  EXPECT_FALSE(outcome.has_value());
  engine.FinishNext();
  EXPECT_EQ(outcome, OkStatus());
  EXPECT_EQ(to, from);
}

TEST(Transfer, CopiesDirectlyWhatTheEngineFailedToMove) {
  ManualEngine engine;
  const auto from = Bytes(64);
  std::vector<char> to(64);
  const auto transfer = Transfer::Start(Direction::kD2h, 0, {Whole(from, to)});
  engine.FinishNext(Unavailable("lane 3 vanished"));
  EXPECT_EQ(transfer->Wait(), OkStatus());
  EXPECT_EQ(to, from);
}

TEST(Transfer, CopiesDirectlyWhatTheEngineRefuses) {
  ManualEngine engine;
  engine.RefuseWith(ResourceExhausted("queue full"));
  const auto from = Bytes(64);
  std::vector<char> to(64);
  const auto transfer = Transfer::Start(Direction::kD2h, 0, {Whole(from, to)});
  EXPECT_EQ(transfer->outcome(), OkStatus());
  EXPECT_EQ(to, from);
}

TEST(Transfer, TellsTheProgramThatItWasCancelled) {
  ManualEngine engine;
  const auto from = Bytes(64);
  std::vector<char> to(64);
  const auto transfer = Transfer::Start(Direction::kD2h, 0, {Whole(from, to)});
  engine.FinishNext(Cancelled("by the user"));
  EXPECT_EQ(transfer->Wait(), Cancelled("by the user"));
}

TEST(Transfer, TellsTheProgramThatThereIsNoSuchDevice) {
  ManualEngine engine;
  engine.RefuseWith(InvalidArgument("gpu: no lane of gpu 7"));
  const auto from = Bytes(64);
  std::vector<char> to(64);
  const auto transfer = Transfer::Start(Direction::kD2h, 7, {Whole(from, to)});
  EXPECT_EQ(transfer->outcome(), InvalidArgument("gpu: no lane of gpu 7"));
}

TEST(Transfer, CallsBackAtOnceWhenItIsOver) {
  const auto from = Bytes(64);
  std::vector<char> to(64);
  const auto transfer = Transfer::Start(Direction::kH2d, 0, {Whole(from, to)});
  bool called = false;
  transfer->OnDone([&](const Status& status) { called = status.ok(); });
  EXPECT_TRUE(called);
}

TEST(Transfer, KeepsMemoryAliveWithoutAnEngineToo) {
  const auto owner = std::make_shared<const std::vector<char>>(Bytes(64));
  std::vector<char> to(64);
  const std::weak_ptr<const std::vector<char>> alive = owner;
  auto transfer = Transfer::StartOn(nullptr, Direction::kH2d, 0,
                                    {Whole(*owner, to)}, owner);
  EXPECT_EQ(alive.use_count(), 2);
  transfer.reset();
  EXPECT_EQ(alive.use_count(), 1);
}

}  // namespace
}  // namespace turbobus::offload

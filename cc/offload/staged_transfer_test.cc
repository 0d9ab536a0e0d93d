#include "offload/staged_transfer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "offload/manual_engine.h"

namespace turbobus::offload {
namespace {

using topo::Direction;

/// Hands what is asked of it to a test, which outlives it.
class Forwarding final : public engine::Engine {
 public:
  using Taker = std::function<void(engine::Request)>;

  explicit Forwarding(Taker taker) : taker_(std::move(taker)) {}

  StatusOr<sched::TransferId> Submit(engine::Request request) override {
    taker_(std::move(request));
    return 1;
  }
  Status Cancel(sched::TransferId) override { return OkStatus(); }
  void Abort(Status) override {}
  engine::Stats GetStats() const override { return {}; }
  std::vector<engine::TraceEvent> Trace() const override { return {}; }

 private:
  const Taker taker_;
};

void CopyAtOnce(engine::Request request) {
  std::memcpy(request.dst, request.src, request.size_bytes);
  request.done(OkStatus());
}

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

TEST(StagedTransfer, OutlivesAnEngineThatIsTakenOutWhileItStarts) {
  std::atomic<bool> is_over = false;
  std::thread flipper([&] {
    const auto engine = std::make_shared<Forwarding>(CopyAtOnce);
    while (!is_over) {
      engine::SetProcessEngine(engine);
      engine::SetProcessEngine(nullptr);
    }
  });
  // Large enough for the engine to change while the bytes are gathered; under
  // the address sanitizer memory that went too early would be caught.
  const std::string from(1 << 18, 'x');
  const int64_t size_bytes = std::ssize(from);
  int num_wrong = 0;
  for (int i = 0; i < 400; ++i) {
    std::string to(from.size(), '.');
    const auto staged = StagedTransfer::Start(
        Direction::kH2d, 0, {{from.data(), to.data(), size_bytes}});
    num_wrong += !staged->transfer()->Wait().ok();
    staged->Land();
    num_wrong += to != from;
  }
  is_over = true;
  flipper.join();
  EXPECT_EQ(num_wrong, 0);
}

TEST(StagedTransfer, HoldsItsEngineUntilItIsOver) {
  std::vector<engine::Request> requests;
  auto engine = std::make_shared<Forwarding>(
      [&](engine::Request r) { requests.push_back(std::move(r)); });
  const std::weak_ptr<Forwarding> alive = engine;
  engine::SetProcessEngine(std::move(engine));
  const std::string from = "abcdefgh";
  std::string to(from.size(), '.');
  const auto staged =
      StagedTransfer::Start(Direction::kH2d, 0, {{from.data(), to.data(), 8}});
  engine::SetProcessEngine(nullptr);
  EXPECT_FALSE(alive.expired());
  ASSERT_EQ(requests.size(), 1U);
  CopyAtOnce(std::exchange(requests, {}).front());
  EXPECT_TRUE(alive.expired());
  staged->Land();
  EXPECT_EQ(to, from);
}

}  // namespace
}  // namespace turbobus::offload

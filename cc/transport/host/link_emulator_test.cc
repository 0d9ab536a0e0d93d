#include "transport/host/link_emulator.h"

#include <gtest/gtest.h>

#include <map>

namespace turbobus::transport::host {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kBlock = 1'000'000;  // 1 ms at `kRate`
constexpr double kRate = 1e9;

/// Steps an emulator as a driver would whose copies take no time.
class Harness {
 public:
  explicit Harness(LinkModel model) : emulator(std::move(model)) {}

  void Issue(uint64_t id, int lane, int64_t now_ns = 0, int64_t size = kBlock) {
    ASSERT_TRUE(emulator.Issue(id, lane, size, now_ns).ok());
    Settle(now_ns);
  }

  /// Runs until nothing is left to happen.
  void RunOut() {
    while (const auto next = emulator.NextEventNs()) {
      emulator.Advance(*next);
      Settle(*next);
    }
  }

  void Settle(int64_t now_ns) {
    while (true) {
      const auto copies = emulator.TakeCopies();
      if (copies.empty()) break;
      for (const auto& copy : copies) {
        slots_used.emplace(copy.id, copy.slot);
        emulator.CopyDone(copy.id, now_ns);
      }
    }
    for (const BlockDone& entry : emulator.TakeDone()) done[entry.id] = entry;
  }

  LinkEmulator emulator;
  std::map<uint64_t, BlockDone> done;
  std::multimap<uint64_t, int> slots_used;
};

LaneModel Direct(int link) { return {.hops = {{.resources = {link}}}}; }

LaneModel Relay(int first, int second, int staging = 0) {
  return {.hops = {{.resources = {first}}, {.resources = {second}}},
          .staging = staging};
}

TEST(LinkEmulatorTest, ALaneDoesItsBlocksOneAfterAnotherWithoutAGap) {
  Harness h({.rates_bytes_per_s = {kRate}, .lanes = {Direct(0)}});
  for (uint64_t id = 1; id <= 3; ++id) h.Issue(id, 0);
  h.RunOut();
  EXPECT_EQ(h.done[1].start_ns, 0);
  EXPECT_EQ(h.done[1].end_ns, 1 * kMs);
  EXPECT_EQ(h.done[2].start_ns, 1 * kMs);
  EXPECT_EQ(h.done[3].end_ns, 3 * kMs);
  EXPECT_EQ(h.emulator.num_blocks(), 0);
}

TEST(LinkEmulatorTest, ADriverThatLooksLateLosesNoTime) {
  Harness h({.rates_bytes_per_s = {kRate}, .lanes = {Direct(0)}});
  h.Issue(1, 0);
  h.Issue(2, 0);
  // Both ended long ago; the second copy is still asked for only now.
  h.emulator.Advance(50 * kMs);
  EXPECT_EQ(h.emulator.TakeDone().front().end_ns, 1 * kMs);
  h.Settle(50 * kMs);
  EXPECT_EQ(h.done[2].start_ns, 1 * kMs);
  EXPECT_EQ(h.done[2].end_ns, 50 * kMs) << "its bytes were not there before";
  EXPECT_EQ(h.emulator.num_late_copies(), 1);
}

TEST(LinkEmulatorTest, LanesOnOneLinkShareIt) {
  Harness h({.rates_bytes_per_s = {kRate}, .lanes = {Direct(0), Direct(0)}});
  h.Issue(1, 0);
  h.Issue(2, 1, 0, 3 * kBlock);
  h.RunOut();
  EXPECT_EQ(h.done[1].end_ns, 2 * kMs);
  EXPECT_EQ(h.done[2].end_ns, 4 * kMs);
}

TEST(LinkEmulatorTest, ARelayFillsOneBufferWhileTheOtherDrains) {
  Harness h({.rates_bytes_per_s = {kRate, kRate},
             .lanes = {Relay(0, 1)},
             .num_stagings = 1});
  for (uint64_t id = 1; id <= 4; ++id) h.Issue(id, 0);
  h.RunOut();
  EXPECT_EQ(h.done[1].relayed_ns, 1 * kMs);
  EXPECT_EQ(h.done[1].end_ns, 2 * kMs);
  // One block a millisecond from then on: both hops are busy at once.
  EXPECT_EQ(h.done[4].end_ns, 5 * kMs);
}

TEST(LinkEmulatorTest, WithOneBufferTheHopsTakeTurns) {
  Harness h({.rates_bytes_per_s = {kRate, kRate},
             .lanes = {Relay(0, 1)},
             .num_stagings = 1,
             .num_slots = 1});
  for (uint64_t id = 1; id <= 3; ++id) h.Issue(id, 0);
  h.RunOut();
  EXPECT_EQ(h.done[3].end_ns, 6 * kMs);
}

TEST(LinkEmulatorTest, ASlowSecondHopHoldsTheFirstBackByTheBuffers) {
  Harness h({.rates_bytes_per_s = {kRate, kRate / 10},
             .lanes = {Relay(0, 1)},
             .num_stagings = 1});
  for (uint64_t id = 1; id <= 3; ++id) h.Issue(id, 0);
  h.RunOut();
  EXPECT_EQ(h.done[2].relayed_ns, 2 * kMs);
  // The third waits until the first has left its buffer.
  EXPECT_EQ(h.done[3].start_ns, 11 * kMs);
  EXPECT_EQ(h.done[3].end_ns, 31 * kMs);
}

TEST(LinkEmulatorTest, TwoBorrowersOfARelayGetABufferEach) {
  Harness h({.rates_bytes_per_s = {kRate, kRate, kRate / 10},
             .lanes = {Relay(0, 2), Relay(1, 2)},
             .num_stagings = 1});
  for (uint64_t id = 0; id < 4; ++id) {
    h.Issue(10 + id, 0);
    h.Issue(20 + id, 1);
  }
  h.RunOut();
  // Neither gets ahead of the other by more than a block.
  for (uint64_t id = 0; id < 4; ++id) {
    EXPECT_NEAR(static_cast<double>(h.done[10 + id].end_ns),
                static_cast<double>(h.done[20 + id].end_ns), 10.1 * kMs);
  }
}

TEST(LinkEmulatorTest, LatencyDelaysABlockButLeavesTheLinkToOthers) {
  Harness h({.rates_bytes_per_s = {kRate},
             .lanes = {{.hops = {{.resources = {0}, .latency_ns = 5 * kMs}}},
                       Direct(0)}});
  h.Issue(1, 0);
  h.Issue(2, 1, 0, 5 * kBlock);
  h.RunOut();
  EXPECT_EQ(h.done[2].end_ns, 5 * kMs);
  EXPECT_EQ(h.done[1].start_ns, 0);
  EXPECT_EQ(h.done[1].end_ns, 6 * kMs);
}

TEST(LinkEmulatorTest, ASlowLaneTakesTheFactorLonger) {
  Harness h({.rates_bytes_per_s = {kRate}, .lanes = {Direct(0)}});
  h.emulator.SlowLane(0, 4, 0);
  h.Issue(1, 0);
  h.Issue(2, 0);
  h.emulator.Advance(6 * kMs);
  h.Settle(6 * kMs);
  h.emulator.SlowLane(0, 1, 6 * kMs);  // half of the second block is over
  h.RunOut();
  EXPECT_EQ(h.done[1].end_ns, 4 * kMs);
  EXPECT_EQ(h.done[2].end_ns, 6 * kMs + kMs / 2);
}

TEST(LinkEmulatorTest, AVanishedLaneEndsItsBlocksButNeverUnderACopy) {
  LinkEmulator emulator({.rates_bytes_per_s = {kRate}, .lanes = {Direct(0)}});
  ASSERT_TRUE(emulator.Issue(1, 0, kBlock, 0).ok());
  ASSERT_TRUE(emulator.Issue(2, 0, kBlock, 0).ok());
  ASSERT_EQ(emulator.TakeCopies().size(), 1);
  emulator.RemoveLane(0, Unavailable("gone"), kMs / 2);
  auto done = emulator.TakeDone();
  ASSERT_EQ(done.size(), 1) << "block 1 is still being copied";
  EXPECT_EQ(done[0].id, 2);
  EXPECT_EQ(done[0].status, Unavailable("gone"));
  EXPECT_EQ(emulator.Issue(3, 0, kBlock, kMs).code(), StatusCode::kUnavailable);
  emulator.CopyDone(1, 2 * kMs);
  done = emulator.TakeDone();
  ASSERT_EQ(done.size(), 1);
  EXPECT_EQ(done[0].id, 1);
  EXPECT_EQ(emulator.num_blocks(), 0);
  EXPECT_TRUE(emulator.TakeCopies().empty());
}

TEST(LinkEmulatorTest, AbortedBlocksGiveTheirBufferAndTurnToTheNext) {
  Harness h({.rates_bytes_per_s = {kRate, kRate},
             .lanes = {Relay(0, 1)},
             .num_stagings = 1,
             .num_slots = 1});
  for (uint64_t id = 1; id <= 3; ++id) h.Issue(id, 0);
  h.emulator.Abort(1, Cancelled("test"), kMs / 2);
  h.emulator.Abort(2, Cancelled("test"), kMs / 2);
  h.Settle(kMs / 2);
  h.RunOut();
  EXPECT_EQ(h.done[1].status.code(), StatusCode::kCancelled);
  EXPECT_EQ(h.done[2].status.code(), StatusCode::kCancelled);
  EXPECT_TRUE(h.done[3].status.ok());
  EXPECT_EQ(h.done[3].end_ns, kMs / 2 + 2 * kMs);
}

TEST(LinkEmulatorTest, UnlimitedLinksEndWithTheCopy) {
  Harness h(UnlimitedLinks(1));
  h.Issue(1, 0, 7);
  EXPECT_EQ(h.done[1].end_ns, 7);
}

TEST(LinkModelTest, MistakesNameTheLaneAndTheField) {
  LinkModel model{.rates_bytes_per_s = {kRate},
                  .lanes = {Direct(0), Direct(1)}};
  EXPECT_EQ(model.Validate().message(),
            "lane 1: resources: no resource 1; there are 1");
  model.lanes = {Relay(0, 0)};
  EXPECT_NE(model.Validate().message().find("lane 0: staging"),
            std::string::npos);
  model.num_stagings = 1;
  EXPECT_TRUE(model.Validate().ok());
  model.rates_bytes_per_s = {0};
  EXPECT_NE(model.Validate().message().find("rates_bytes_per_s[0]"),
            std::string::npos);
}

}  // namespace
}  // namespace turbobus::transport::host

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/stream_engine.h"
#include "engine/stream_testing.h"

// Links that are lent: how much goes over them, and when none does.

namespace turbobus::engine {
namespace {

using topo::Direction;

constexpr RelayStreams kRelayStreams[] = {
    RelayStreams::kPerLeg, RelayStreams::kPerSlot, RelayStreams::kPerSlotLoose};

TEST(StreamRelaysTest, IdleLinksAreUsedAndSharedOutEvenly) {
  Machine machine(2);
  const Buffer host = Random(4096 * kKiB, 1);
  Buffer device(host.size());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_NEAR(machine.BytesOver(0, 1), 2048 * kKiB, 8 * kKiB);
  EXPECT_GT(machine.streams->num_yields, 30);
  EXPECT_EQ(machine.engine->stats().num_pooled, 1);
}

TEST(StreamRelaysTest, ARunAheadHostStillPoolsEveryTransfer) {
  Machine machine(2);
  const Buffer host = Random(900 * kKiB, 1);
  std::vector<Buffer> devices(12, Buffer(host.size()));
  for (Buffer& device : devices) {
    ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
  }
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_EQ(machine.engine->stats().num_pooled, 12);
  EXPECT_NEAR(machine.BytesOver(0, 1), 12 * 450 * kKiB, 12 * 8 * kKiB);
}

TEST(StreamRelaysTest, TwoBorrowersGetOneSlotEach) {
  Machine machine(3);
  const Buffer host = Random(900 * kKiB, 1);
  std::vector<Buffer> devices(20, Buffer(host.size()));
  // Nothing that is issued has begun, once each knows of the other.
  bool is_open = true;
  for (const int gpu : {0, 1}) {
    ASSERT_EQ(machine.engine->Copy(machine.H2d(gpu, host, devices[gpu])),
              OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
  }
  is_open = false;
  const int64_t before[] = {machine.BytesOver(0, 2), machine.BytesOver(1, 2)};
  for (const int gpu : {0, 1}) {
    machine.streams->Enqueue(machine.xla[gpu], [] {}, [&] { return is_open; });
  }
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(machine.engine->Copy(machine.H2d(i % 2, host, devices[i])),
              OkStatus());
  }
  is_open = true;
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_GT(machine.BytesOver(0, 2), before[0]);
  EXPECT_GT(machine.BytesOver(1, 2), before[1]);
  for (const Buffer& device : devices) ASSERT_EQ(device, host);
}

TEST(StreamRelaysTest, GpusThatAreBusyTogetherStopLending) {
  Machine machine(2);
  const Buffer host = Random(4096 * kKiB, 1);
  std::vector<Buffer> devices(2, Buffer(host.size()));
  const auto both = [&] {
    for (int gpu = 0; gpu < 2; ++gpu) {
      ASSERT_EQ(machine.engine->Copy(machine.H2d(gpu, host, devices[gpu])),
                OkStatus());
    }
    ASSERT_TRUE(machine.streams->Drain());
  };
  for (int i = 0; i < 4; ++i) both();
  const int64_t lent = machine.BytesOver(0, 1) + machine.BytesOver(1, 0);
  for (int i = 0; i < 4; ++i) both();
  EXPECT_EQ(machine.BytesOver(0, 1) + machine.BytesOver(1, 0), lent);
  // One of them alone is lent to again.
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, devices[0])),
              OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
  }
  EXPECT_GT(machine.BytesOver(0, 1) + machine.BytesOver(1, 0), lent);
}

TEST(StreamRelaysTest, ALateRelayGetsLessUntilItIsOnTimeAgain) {
  StreamSettings settings = SmallBlocks();
  Machine machine(2, 1, settings);
  const Buffer host = Random(24576 * kKiB, 1);
  Buffer device(host.size());
  const auto relayed = [&] {
    const int64_t before = machine.BytesOver(0, 1);
    EXPECT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
    EXPECT_TRUE(machine.streams->Drain());
    return machine.BytesOver(0, 1) - before;
  };
  // A block crosses the relay's clock twice.
  machine.streams->bytes_per_ns[1] = 100;
  EXPECT_GT(relayed(), 11500 * kKiB);
  machine.streams->bytes_per_ns[1] = 2;
  EXPECT_GT(relayed(), 11500 * kKiB);
  EXPECT_EQ(relayed(), settings.block_bytes);
  EXPECT_EQ(relayed(), settings.block_bytes);
  machine.streams->bytes_per_ns[1] = 100;
  EXPECT_EQ(relayed(), settings.block_bytes);
  int64_t last = 0;
  for (int i = 0; i < 6; ++i) last = relayed();
  EXPECT_GT(last, 11500 * kKiB);
}

TEST(StreamRelaysTest, ARelayThatCostsMoreThanItGainsIsLeftOut) {
  Machine machine(3);
  const Buffer host = Random(24576 * kKiB, 1);
  Buffer device(host.size());
  const auto copy = [&] {
    ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_EQ(device, host);
  };
  machine.streams->bytes_per_ns = {{1, 100}, {2, 100}};
  copy();
  EXPECT_GT(machine.BytesOver(0, 1), 0);
  // At every copy: far longer than any credit covers.
  machine.streams->stalls_ns[1] = 2'000'000'000;
  copy();
  machine.streams->stalls_ns[1] = 0;
  const int64_t over_1 = machine.BytesOver(0, 1);
  const int64_t over_2 = machine.BytesOver(0, 2);
  for (int i = 0; i < 6; ++i) copy();
  EXPECT_EQ(machine.BytesOver(0, 1), over_1);
  EXPECT_GT(machine.BytesOver(0, 2), over_2);
  machine.streams->Sleep(LoanBook::kPauseFactor * 10'000'000'000'000);
  for (int i = 0; i < 4; ++i) copy();
  EXPECT_GT(machine.BytesOver(0, 1), over_1);
}

TEST(StreamRelaysTest, AMachineThatIsSlowAsAWholeIsNotTheRelaysFault) {
  Machine machine(2);
  const Buffer host = Random(24576 * kKiB, 1);
  Buffer device(host.size());
  machine.streams->bytes_per_ns = {{0, 5}, {1, 10}};
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
  }
  EXPECT_NEAR(machine.BytesOver(0, 1), 4 * 12288 * kKiB, 1000 * kKiB);
}

TEST(StreamRelaysTest, RelaysMayChangeTheirStreamsBetweenTransfers) {
  // All issued before anything happens: each transfer finds its slots taken by
  // one that used other streams.
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    Machine machine(2, seed);
    const Buffer host = Random(900 * kKiB + static_cast<int64_t>(seed), seed);
    std::vector<Buffer> devices(9, Buffer(host.size()));
    std::vector<Buffer> hosts(9, Buffer(host.size()));
    for (size_t i = 0; i < devices.size(); ++i) {
      StreamSettings settings = SmallBlocks();
      settings.relay_streams = kRelayStreams[(i + i / 3) % 3];
      ASSERT_EQ(machine.engine->SetSettings(settings), OkStatus());
      ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, devices[i])),
                OkStatus());
      ASSERT_EQ(machine.engine->Copy(machine.D2h(0, devices[i], hosts[i])),
                OkStatus());
    }
    ASSERT_TRUE(machine.streams->Drain());
    EXPECT_EQ(machine.engine->stats().num_pooled, 18);
    for (const Buffer& device : devices) ASSERT_EQ(device, host) << seed;
    for (const Buffer& back : hosts) ASSERT_EQ(back, host) << seed;
  }
}

TEST(StreamRelaysTest, ASlotsStreamNeedsNoYieldsAndFailsAsWell) {
  for (const RelayStreams relay_streams : kRelayStreams) {
    if (relay_streams == RelayStreams::kPerLeg) continue;
    StreamSettings settings = SmallBlocks();
    settings.relay_streams = relay_streams;
    Machine machine(2, 1, settings);
    const Buffer host = Random(4096 * kKiB, 1);
    Buffer device(host.size());
    ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    EXPECT_NEAR(machine.BytesOver(0, 1), 2048 * kKiB, 8 * kKiB);
    // Of the direct lane: 32 blocks.
    EXPECT_LE(machine.streams->num_yields, 32);
    machine.engine->InjectFault(1);
    for (int i = 0; i < 2; ++i) {
      std::ranges::fill(device, std::byte{0});
      ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
      ASSERT_TRUE(machine.streams->Drain());
      EXPECT_EQ(device, host);
    }
    EXPECT_EQ(machine.engine->TakeMessages().size(), 1);
  }
}

TEST(StreamRelaysTest, ARelayThatFailsIsDroppedAndItsBlocksGoDirect) {
  Machine machine(2);
  machine.engine->InjectFault(1);
  const Buffer host = Random(1900 * kKiB, 1);
  Buffer device(host.size());
  for (int i = 0; i < 2; ++i) {
    std::ranges::fill(device, std::byte{0});
    ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    EXPECT_EQ(device, host);
  }
  std::string dropped;
  for (const PathStats& path : machine.engine->stats().paths) {
    if (path.path.gpu == 0 && path.path.relay == 1 &&
        path.path.direction == Direction::kH2d) {
      dropped = path.dropped;
    }
  }
  EXPECT_EQ(dropped, "injected fault");
  EXPECT_EQ(machine.engine->TakeMessages().size(), 1);
  EXPECT_TRUE(machine.engine->TakeMessages().empty());
}

TEST(StreamRelaysTest, RelaysThatCannotBeSetUpAreLeftOutWithAReason) {
  Machine machine(4, 1, SmallBlocks(), [](FakeStreams& streams) {
    streams.no_peer_access = {{1, 0}};
    streams.no_memory = {2};
    streams.other_lenders = {3};
  });
  const Buffer host = Random(1900 * kKiB, 1);
  Buffer device(host.size());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_EQ(device, host);
  EXPECT_EQ(machine.BytesOver(0, topo::kNoRelay),
            static_cast<int64_t>(host.size()));
  for (const PathStats& path : machine.engine->stats().paths) {
    if (path.path.gpu == 0 && path.path.is_relay()) {
      EXPECT_NE(path.dropped, "");
    }
  }
}

TEST(StreamRelaysTest, MemoryThatARelayCannotReachGoesDirect) {
  Machine machine(2);
  const Buffer host = Random(1900 * kKiB, 1);
  Buffer device(host.size());
  machine.streams->unreachable.insert(device.data());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_EQ(device, host);
  EXPECT_EQ(machine.BytesOver(0, 1), 0);
}

}  // namespace
}  // namespace turbobus::engine

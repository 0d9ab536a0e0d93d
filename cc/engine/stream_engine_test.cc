#include "engine/stream_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine/fake_streams.h"

namespace turbobus::engine {
namespace {

using topo::Direction;
using topo::Path;
using transport::RowCopy;
using transport::Stream;

constexpr int64_t kKiB = 1024;

using Buffer = std::vector<std::byte>;

Buffer Random(int64_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Buffer buffer(static_cast<size_t>(size));
  for (std::byte& b : buffer) b = static_cast<std::byte>(random());
  return buffer;
}

std::vector<Path> AllPaths(int num_gpus) {
  std::vector<Path> paths;
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    for (const Direction direction : {Direction::kH2d, Direction::kD2h}) {
      for (int relay = topo::kNoRelay; relay < num_gpus; ++relay) {
        if (relay == gpu) continue;
        paths.push_back({.gpu = gpu,
                         .relay = relay,
                         .direction = direction,
                         .bandwidth_bytes_per_s = 50e9,
                         .links = {}});
      }
    }
  }
  return paths;
}

/// Small blocks: everything that pooled transfers do happens on kilobytes.
StreamSettings SmallBlocks() {
  return {.block_bytes = 64 * kKiB,
          .min_pooled_bytes = 128 * kKiB,
          .direct_latency_ns = 0,
          .relay_latency_ns = 0};
}

class Machine {
 public:
  explicit Machine(
      int num_gpus, uint64_t seed = 1, StreamSettings settings = SmallBlocks(),
      const std::function<void(FakeStreams&)>& configure = [](FakeStreams&) {
      }) {
    auto fake = std::make_unique<FakeStreams>(num_gpus, seed);
    streams = fake.get();
    configure(*fake);
    auto made =
        StreamEngine::Create(std::move(fake), AllPaths(num_gpus), settings);
    EXPECT_TRUE(made.ok()) << made.status();
    engine = std::move(made).value();
    for (int gpu = 0; gpu < num_gpus; ++gpu) {
      xla.push_back(*streams->CreateStream(gpu));
    }
  }

  CopyRequest H2d(int gpu, const Buffer& host, Buffer& device) {
    streams->device.insert(device.data());
    return {.call = "h2d",
            .gpu = gpu,
            .direction = Direction::kH2d,
            .stream = xla[gpu],
            .run = 1,
            .src = host.data(),
            .dst = device.data(),
            .size_bytes = static_cast<int64_t>(host.size())};
  }
  CopyRequest D2h(int gpu, const Buffer& device, Buffer& host) {
    streams->device.insert(device.data());
    return {.call = "d2h",
            .gpu = gpu,
            .direction = Direction::kD2h,
            .stream = xla[gpu],
            .run = 1,
            .src = device.data(),
            .dst = host.data(),
            .size_bytes = static_cast<int64_t>(device.size())};
  }
  DoneRequest DoneOf(const CopyRequest& start) {
    return {.call = "done",
            .gpu = start.gpu,
            .stream = start.stream,
            .run = start.run,
            .buffer = start.dst};
  }
  RowRequest Row(int gpu, Buffer& stack, int32_t num_rows, int32_t& index,
                 Buffer& row, bool is_store = false) {
    streams->device.insert(row.data());
    streams->device.insert(&index);
    RowCopy copy;
    copy.stack = stack.data();
    copy.row = row.data();
    copy.index = &index;
    copy.num_rows = num_rows;
    copy.piece_bytes = static_cast<int64_t>(row.size());
    copy.stride_bytes = static_cast<int64_t>(stack.size());
    copy.is_store = is_store;
    return {
        .call = "row", .gpu = gpu, .stream = xla[gpu], .run = 1, .row = copy};
  }
  int64_t BytesOver(int gpu, int relay) {
    int64_t bytes = 0;
    for (const PathStats& path : engine->stats().paths) {
      if (path.path.gpu == gpu && path.path.relay == relay) {
        bytes += path.size_bytes;
      }
    }
    return bytes;
  }

  FakeStreams* streams;
  std::unique_ptr<StreamEngine> engine;
  std::vector<Stream> xla;
};

TEST(StreamEngineTest, PooledTransfersAreExactInWhateverOrderThingsHappen) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    StreamSettings settings = SmallBlocks();
    settings.is_lock_step = seed % 2 == 0;
    settings.relay_streams = static_cast<RelayStreams>(seed % 3);
    Machine machine(1 + static_cast<int>(seed % 4), seed, settings);
    const auto size = static_cast<int64_t>(1 + seed * 7919 % 1500 * kKiB);
    const Buffer host = Random(size, seed);
    Buffer device(host.size());
    Buffer back(host.size());
    ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
    ASSERT_EQ(machine.engine->Copy(machine.D2h(0, device, back)), OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_EQ(device, host) << seed;
    ASSERT_EQ(back, host) << seed;
  }
}

TEST(StreamEngineTest, IdleLinksAreUsedAndSharedOutEvenly) {
  Machine machine(2);
  const Buffer host = Random(4096 * kKiB, 1);
  Buffer device(host.size());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_NEAR(machine.BytesOver(0, 1), 2048 * kKiB, 8 * kKiB);
  EXPECT_GT(machine.streams->num_yields, 30);
  EXPECT_EQ(machine.engine->stats().num_pooled, 1);
}

TEST(StreamEngineTest, TheSourceMayBeOverwrittenRightAfter) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine(3, seed);
    Buffer device = Random(1000 * kKiB, seed);
    const Buffer expected = device;
    Buffer host(device.size());
    ASSERT_EQ(machine.engine->Copy(machine.D2h(1, device, host)), OkStatus());
    machine.streams->Enqueue(machine.xla[1],
                             [&] { std::ranges::fill(device, std::byte{0}); });
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_EQ(host, expected) << seed;
  }
}

TEST(StreamEngineTest, TransfersWaitForWhatTheProgramComputesBefore) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine(2, seed);
    Buffer device(700 * kKiB);
    const Buffer expected = Random(700 * kKiB, seed);
    Buffer host(device.size());
    machine.streams->Enqueue(machine.xla[0], [&] { device = expected; });
    // The vector keeps its memory: same size.
    ASSERT_EQ(machine.engine->Copy(machine.D2h(0, device, host)), OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_EQ(host, expected) << seed;
  }
}

TEST(StreamEngineTest, AStartedTransferIsCompleteAfterDone) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine(2, seed);
    const Buffer a = Random(900 * kKiB, seed);
    const Buffer b = Random(300 * kKiB, seed + 1);
    Buffer on_a(a.size());
    Buffer on_b(b.size());
    Buffer seen_a;
    Buffer seen_b;
    const CopyRequest start_a = machine.H2d(0, a, on_a);
    const CopyRequest start_b = machine.H2d(0, b, on_b);
    ASSERT_EQ(machine.engine->Start(start_a), OkStatus());
    ASSERT_EQ(machine.engine->Start(start_b), OkStatus());
    ASSERT_EQ(machine.engine->Done(machine.DoneOf(start_b)), OkStatus());
    machine.streams->Enqueue(machine.xla[0], [&] { seen_b = on_b; });
    ASSERT_EQ(machine.engine->Done(machine.DoneOf(start_a)), OkStatus());
    machine.streams->Enqueue(machine.xla[0], [&] { seen_a = on_a; });
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_EQ(seen_a, a);
    ASSERT_EQ(seen_b, b);
  }
}

TEST(StreamEngineTest, DoneOfAnotherBufferIsAnErrorWithAName) {
  Machine machine(2);
  const Buffer host = Random(900 * kKiB, 1);
  Buffer device(host.size());
  Buffer copied(host.size());
  const CopyRequest start = machine.H2d(0, host, device);
  ASSERT_EQ(machine.engine->Start(start), OkStatus());
  DoneRequest done = machine.DoneOf(start);
  done.buffer = copied.data();
  done.call = "turbobus_h2d_done";
  const Status status = machine.engine->Done(done);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("turbobus_h2d_done"), std::string::npos);
  // The program ends here: its stream has what was in flight behind it.
  Buffer seen;
  machine.streams->Enqueue(machine.xla[0], [&] { seen = device; });
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_EQ(seen, host);
  done = machine.DoneOf(start);
  EXPECT_EQ(machine.engine->Done(done).code(), StatusCode::kFailedPrecondition);
}

TEST(StreamEngineTest, DoneOfAnotherRunFindsNothing) {
  Machine machine(2);
  const Buffer host = Random(900 * kKiB, 1);
  Buffer device(host.size());
  const CopyRequest start = machine.H2d(0, host, device);
  ASSERT_EQ(machine.engine->Start(start), OkStatus());
  DoneRequest done = machine.DoneOf(start);
  done.run = 2;
  EXPECT_EQ(machine.engine->Done(done).code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(machine.streams->Drain());
}

TEST(StreamEngineTest, AnAbandonedTransferDoesNotSpoilItsBuffersNextUse) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine(2, seed);
    const Buffer old = Random(900 * kKiB, seed);
    const Buffer fresh = Random(900 * kKiB, seed + 1);
    Buffer device(old.size());
    ASSERT_EQ(machine.engine->Start(machine.H2d(0, old, device)), OkStatus());
    // Its program failed; another one got the buffer.
    CopyRequest next = machine.H2d(0, fresh, device);
    next.run = 2;
    ASSERT_EQ(machine.engine->Copy(next), OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_EQ(device, fresh) << seed;
  }
}

TEST(StreamEngineTest, CollectivesInAnyOrderDoNotDeadlock) {
  // GPU 0: collective, A. GPU 1: B, collective. All issued before anything
  // happens; A's relay blocks come first on B's link.
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    Machine machine(3, seed);
    const Buffer host = Random(900 * kKiB, seed);
    std::vector<Buffer> devices(8, Buffer(host.size()));
    auto arrived = std::make_shared<int>(0);
    const auto collective = [&](int gpu) {
      machine.streams->Enqueue(machine.xla[gpu], [arrived] { ++*arrived; });
      machine.streams->Enqueue(
          machine.xla[gpu], [] {}, [arrived] { return *arrived >= 2; });
    };
    collective(0);
    for (int i = 0; i < 4; ++i) {
      ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, devices[i])),
                OkStatus());
    }
    for (int i = 4; i < 8; ++i) {
      ASSERT_EQ(machine.engine->Copy(machine.H2d(1, host, devices[i])),
                OkStatus());
    }
    collective(1);
    ASSERT_TRUE(machine.streams->Drain()) << "deadlock, seed " << seed;
    for (const Buffer& device : devices) ASSERT_EQ(device, host);
  }
}

TEST(StreamEngineTest, ARunAheadHostStillPoolsEveryTransfer) {
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

TEST(StreamEngineTest, CopiesThatHaveNotBegunKeepNobodyFromTheOwnLink) {
  // More programs of one GPU, each on a stream of its own, than it has lanes.
  Machine machine(1);
  bool is_open = false;
  const Buffer host = Random(900 * kKiB, 1);
  std::vector<Buffer> devices(8, Buffer(host.size()));
  for (Buffer& device : devices) {
    CopyRequest request = machine.H2d(0, host, device);
    request.stream = *machine.streams->CreateStream(0);
    machine.streams->Enqueue(request.stream, [] {}, [&] { return is_open; });
    ASSERT_EQ(machine.engine->Copy(request), OkStatus());
  }
  is_open = true;
  ASSERT_TRUE(machine.streams->Drain());
  for (const Buffer& device : devices) ASSERT_EQ(device, host);
  EXPECT_EQ(machine.engine->stats().num_plain, 0);
  EXPECT_EQ(machine.engine->stats().num_direct, 8);
  EXPECT_GT(machine.streams->num_yields, 8 * 10);
}

TEST(StreamEngineTest, TwoBorrowersGetOneSlotEach) {
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

TEST(StreamEngineTest, ARelayThatFailsIsDroppedAndItsBlocksGoDirect) {
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

constexpr RelayStreams kRelayStreams[] = {
    RelayStreams::kPerLeg, RelayStreams::kPerSlot, RelayStreams::kPerSlotLoose};

TEST(StreamEngineTest, RelaysMayChangeTheirStreamsBetweenTransfers) {
  // All issued before anything happens: each transfer finds its slots taken by
  // one that used other streams.
  for (uint64_t seed = 1; seed <= 60; ++seed) {
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

TEST(StreamEngineTest, ASlotsStreamNeedsNoYieldsAndFailsAsWell) {
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

TEST(StreamEngineTest, RelaysThatCannotBeSetUpAreLeftOutWithAReason) {
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

TEST(StreamEngineTest, MemoryThatARelayCannotReachGoesDirect) {
  Machine machine(2);
  const Buffer host = Random(1900 * kKiB, 1);
  Buffer device(host.size());
  machine.streams->unreachable.insert(device.data());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_EQ(device, host);
  EXPECT_EQ(machine.BytesOver(0, 1), 0);
}

TEST(StreamEngineTest, AnErrorOfTheDirectLaneIsAnErrorOfTheCall) {
  Machine machine(2);
  const Buffer host = Random(1900 * kKiB, 1);
  Buffer device(host.size());
  const CopyRequest request = machine.H2d(0, host, device);
  machine.streams->copy_error = Internal("an illegal memory access");
  const Status status = machine.engine->Copy(request);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_TRUE(machine.streams->Drain());
}

TEST(StreamEngineTest, ALateRelayGetsLessUntilItIsOnTimeAgain) {
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

TEST(StreamEngineTest, ARelayThatCostsMoreThanItGainsIsLeftOut) {
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
  for (int i = 0; i < 20; ++i) copy();
  EXPECT_EQ(machine.BytesOver(0, 1), over_1);
  EXPECT_GT(machine.BytesOver(0, 2), over_2);
  machine.streams->Sleep(LoanBook::kPauseFactor * 10'000'000'000'000);
  for (int i = 0; i < 10; ++i) copy();
  EXPECT_GT(machine.BytesOver(0, 1), over_1);
}

TEST(StreamEngineTest, AMachineThatIsSlowAsAWholeIsNotTheRelaysFault) {
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

TEST(StreamEngineTest, GpusThatAreBusyTogetherStopLending) {
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

TEST(StreamEngineTest, RowsAreFetchedAndStoredWhereTheDeviceSays) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Machine machine(1 + static_cast<int>(seed % 3), seed);
    const int64_t row_bytes = (seed % 2 == 0 ? 300 : 30) * kKiB + 3;
    Buffer stack = Random(5 * row_bytes, seed);
    const Buffer original = stack;
    Buffer row(static_cast<size_t>(row_bytes));
    auto index = static_cast<int32_t>(seed % 8) - 1;  // clamped
    const int32_t clamped = std::clamp(index, 0, 4);
    ASSERT_EQ(machine.engine->CopyRow(machine.Row(0, stack, 5, index, row)),
              OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_TRUE(std::equal(row.begin(), row.end(),
                           original.begin() + clamped * row_bytes));
    const Buffer stored = Random(row_bytes, seed + 9);
    row = stored;
    ASSERT_EQ(
        machine.engine->CopyRow(machine.Row(0, stack, 5, index, row, true)),
        OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    Buffer expected = original;
    std::ranges::copy(stored, expected.begin() + clamped * row_bytes);
    ASSERT_EQ(stack, expected);
  }
}

TEST(StreamEngineTest, StartedFetchesAreRightWhetherGuessedOrNot) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    Machine machine(2, seed);
    const int64_t row_bytes = 300 * kKiB;
    constexpr int32_t kRows = 6;
    Buffer stack = Random(kRows * row_bytes, seed);
    std::mt19937 random(static_cast<uint32_t>(seed));
    int32_t index = 0;  // on the device: set in stream order
    for (int run = 1; run <= 4; ++run) {
      for (int32_t i = 0; i < kRows; ++i) {
        const int32_t wanted = seed % 2 == 0 ? i : random() % kRows;
        Buffer row(static_cast<size_t>(row_bytes));
        Buffer seen;
        RowRequest request = machine.Row(0, stack, kRows, index, row);
        request.run = run;
        machine.streams->Enqueue(machine.xla[0],
                                 [&index, wanted] { index = wanted; });
        ASSERT_EQ(machine.engine->StartRow(request), OkStatus());
        ASSERT_EQ(machine.engine->Done({.call = "done",
                                        .gpu = 0,
                                        .stream = machine.xla[0],
                                        .run = run,
                                        .buffer = row.data()}),
                  OkStatus());
        machine.streams->Enqueue(machine.xla[0], [&] { seen = row; });
        ASSERT_TRUE(machine.streams->Drain());
        ASSERT_TRUE(std::equal(seen.begin(), seen.end(),
                               stack.begin() + wanted * row_bytes))
            << "seed " << seed << " row " << i;
      }
    }
    const StreamStats stats = machine.engine->stats();
    if (seed % 2 == 0) {
      EXPECT_EQ(stats.num_rows_guessed, 4 * kRows);
      EXPECT_EQ(stats.num_guesses_wrong, 0);
    } else {
      EXPECT_GT(stats.num_guesses_wrong, 0);
    }
  }
}

TEST(StreamEngineTest, AStartedStoreIsCompleteAfterDone) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine(2, seed);
    Buffer stack(4 * 300 * kKiB);
    Buffer row = Random(300 * kKiB, seed);
    const Buffer stored = row;
    int32_t index = 2;
    ASSERT_EQ(
        machine.engine->StartRow(machine.Row(0, stack, 4, index, row, true)),
        OkStatus());
    ASSERT_EQ(machine.engine->Done({.call = "done",
                                    .gpu = 0,
                                    .stream = machine.xla[0],
                                    .run = 1,
                                    .buffer = stack.data()}),
              OkStatus());
    Buffer seen;
    machine.streams->Enqueue(machine.xla[0], [&] { seen = stack; });
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_TRUE(std::equal(stored.begin(), stored.end(),
                           seen.begin() + 2 * 300 * kKiB));
  }
}

TEST(StreamEngineTest, SeveralRowsOfOneStackAreDoneOneByOne) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Machine machine(2, seed);
    Buffer stack(4 * 300 * kKiB);
    std::vector<Buffer> rows = {Random(300 * kKiB, 1), Random(300 * kKiB, 2)};
    int32_t indices[] = {3, 1};
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(machine.engine->StartRow(
                    machine.Row(0, stack, 4, indices[i], rows[i], true)),
                OkStatus());
    }
    const DoneRequest done = {.call = "done",
                              .gpu = 0,
                              .stream = machine.xla[0],
                              .run = 1,
                              .buffer = stack.data()};
    ASSERT_EQ(machine.engine->Done(done), OkStatus());
    ASSERT_EQ(machine.engine->Done(done), OkStatus());
    EXPECT_FALSE(machine.engine->Done(done).ok());
    ASSERT_TRUE(machine.streams->Drain());
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(std::equal(rows[i].begin(), rows[i].end(),
                             stack.begin() + indices[i] * 300 * kKiB));
    }
  }
}

TEST(StreamEngineTest, PathsAreMeasuredAloneAndTogether) {
  Machine machine(2);
  std::atomic<bool> is_measured = false;
  std::thread device([&] {
    while (machine.streams->num_copies < 3 * 16) std::this_thread::yield();
    while (!is_measured) machine.streams->Drain();
  });
  // Paths 0 and 1: GPU 0, in, direct and over GPU 1.
  const auto rates = machine.engine->Measure({0, 1}, 16 * 64 * kKiB, 64 * kKiB);
  is_measured = true;
  device.join();
  ASSERT_TRUE(rates.ok()) << rates.status();
  ASSERT_EQ(rates->size(), 2);
  for (const double rate : *rates) EXPECT_GT(rate, 0);
  EXPECT_FALSE(machine.engine->Measure({99}, 1, 1).ok());
}

TEST(StreamEngineTest, PageableStacksAreRefusedWithAWayOut) {
  Machine machine(2);
  Buffer stack(4 * 300 * kKiB);
  Buffer row(300 * kKiB);
  int32_t index = 2;
  const RowRequest request = machine.Row(0, stack, 4, index, row);
  machine.streams->pageable.insert(stack.data());
  const Status status = machine.engine->CopyRow(request);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("pinned_host"), std::string::npos);
}

TEST(StreamEngineTest, DisabledOrPageableOrSmallIsOnePlainCopy) {
  Machine machine(2);
  const Buffer big = Random(900 * kKiB, 1);
  const Buffer small = Random(9 * kKiB, 1);
  Buffer device(big.size());
  Buffer small_device(small.size());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, small, small_device)),
            OkStatus());
  machine.streams->pageable.insert(big.data());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, big, device)), OkStatus());
  machine.streams->pageable.clear();
  StreamSettings settings = SmallBlocks();
  settings.is_disabled = true;
  ASSERT_EQ(machine.engine->SetSettings(settings), OkStatus());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, big, device)), OkStatus());
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_EQ(machine.streams->num_copies, 3);
  EXPECT_EQ(machine.engine->stats().num_plain, 3);
  EXPECT_EQ(device, big);
}

TEST(StreamEngineTest, NothingGrowsOverManyTransfers) {
  Machine machine(2);
  const Buffer host = Random(300 * kKiB, 1);
  Buffer device(host.size());
  int64_t num_events = 0;
  for (int i = 0; i < 1000; ++i) {
    const CopyRequest request = machine.H2d(0, host, device);
    if (i % 2 == 0) {
      ASSERT_EQ(machine.engine->Copy(request), OkStatus());
    } else {
      ASSERT_EQ(machine.engine->Start(request), OkStatus());
      ASSERT_EQ(machine.engine->Done(machine.DoneOf(request)), OkStatus());
    }
    if (i % 10 == 9) {
      ASSERT_TRUE(machine.streams->Drain());
    }
    if (i == 100) num_events = machine.engine->stats().num_events;
  }
  EXPECT_EQ(machine.engine->stats().num_events, num_events);
  EXPECT_EQ(machine.engine->stats().num_in_flight, 0);
  EXPECT_EQ(machine.engine->stats().num_completed, 1000);
  EXPECT_EQ(machine.engine->recent_transfers().size(), 256);
}

TEST(StreamEngineTest, TimesAreAsExactAfterDaysAsInTheFirstSecond) {
  // Whether GPUs are busy together is told from them: a copy of 4 MiB takes 80
  // us, the float that CUDA has for five days is no better than 32 ms.
  Machine machine(1);
  const Buffer host = Random(4096 * kKiB, 1);
  Buffer device(host.size());
  for (int day = 0; day < 5; ++day) {
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
      ASSERT_TRUE(machine.streams->Drain());
    }
    const TransferRecord last = machine.engine->recent_transfers().back();
    EXPECT_NEAR(static_cast<double>(last.ended_ns - last.started_ns),
                static_cast<double>(host.size()) / 50, 4'000)
        << day;
    EXPECT_NEAR(static_cast<double>(last.ended_ns),
                static_cast<double>(machine.streams->NowNs()), 300'000)
        << day;
    machine.streams->Sleep(int64_t{86'400'000'000'000});
  }
}

TEST(StreamEngineTest, TracesHaveEveryBlockOnItsLane) {
  StreamSettings settings = SmallBlocks();
  settings.is_traced = true;
  Machine machine(2, 1, settings);
  const Buffer host = Random(2048 * kKiB, 1);
  Buffer device(host.size());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
  ASSERT_TRUE(machine.streams->Drain());
  int64_t bytes = 0;
  const std::vector<StreamSpan> spans = machine.engine->TakeSpans();
  for (const StreamSpan& span : spans) {
    EXPECT_LE(span.start_ns, span.end_ns);
    bytes += span.size_bytes;
  }
  EXPECT_EQ(bytes, static_cast<int64_t>(host.size()));
  EXPECT_GT(spans.size(), 30);
  EXPECT_TRUE(machine.engine->TakeSpans().empty());
}

TEST(StreamEngineTest, HandlersOfSeveralDevicesMayCallAtOnce) {
  Machine machine(4, 3);
  const Buffer host = Random(700 * kKiB, 1);
  std::vector<std::vector<Buffer>> devices(
      4, std::vector<Buffer>(20, Buffer(host.size())));
  std::vector<std::vector<CopyRequest>> requests(4);
  for (int gpu = 0; gpu < 4; ++gpu) {
    for (Buffer& device : devices[gpu]) {
      requests[gpu].push_back(machine.H2d(gpu, host, device));
    }
  }
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < 4; ++gpu) {
    threads.emplace_back([&, gpu] {
      for (size_t i = 0; i < requests[gpu].size(); ++i) {
        const CopyRequest& request = requests[gpu][i];
        if (i % 3 == 0) {
          ASSERT_EQ(machine.engine->Start(request), OkStatus());
          ASSERT_EQ(machine.engine->Done(machine.DoneOf(request)), OkStatus());
        } else {
          ASSERT_EQ(machine.engine->Copy(request), OkStatus());
        }
        for (int s = 0; s < 40; ++s) machine.streams->Step();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(machine.streams->Drain());
  for (const auto& of_gpu : devices) {
    for (const Buffer& device : of_gpu) ASSERT_EQ(device, host);
  }
}

TEST(StreamEngineTest, SettingsThatCannotWorkAreRefusedByName) {
  Machine machine(1);
  StreamSettings settings = SmallBlocks();
  settings.block_bytes = 0;
  EXPECT_NE(machine.engine->SetSettings(settings).message().find("block_bytes"),
            std::string::npos);
  settings = SmallBlocks();
  settings.block_bytes *= 2;
  EXPECT_EQ(machine.engine->SetSettings(settings).code(),
            StatusCode::kInvalidArgument);
  settings = SmallBlocks();
  settings.late_factor = 0.5;
  EXPECT_NE(machine.engine->SetSettings(settings).message().find("late_factor"),
            std::string::npos);
}

}  // namespace
}  // namespace turbobus::engine

#include "engine/stream_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/stream_testing.h"

// Transfers: their bytes, their place among other work, and what refuses them.

namespace turbobus::engine {
namespace {

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
  machine.engine->Leave(machine.LeaveOf(start));
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

TEST(StreamEngineTest,
     WhatARunLeavesInFlightIsOverBeforeItsBuffersAreAnothers) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Machine machine(2, seed);
    const Buffer in = Random(900 * kKiB, seed);
    Buffer from_device = Random(900 * kKiB, seed + 1);
    const Buffer out = from_device;
    Buffer stack = Random(4 * 900 * kKiB, seed + 2);
    int32_t index = 0;  // what is guessed first; only a done tells
    const Buffer row(stack.begin(), stack.begin() + 900 * kKiB);
    Buffer on_device(in.size());
    Buffer on_host(out.size());
    Buffer fetched(row.size());
    const CopyRequest first = machine.H2d(0, in, on_device);
    ASSERT_EQ(machine.engine->Start(first), OkStatus());
    ASSERT_EQ(machine.engine->Start(machine.D2h(0, from_device, on_host)),
              OkStatus());
    ASSERT_EQ(
        machine.engine->StartRow(machine.Row(0, stack, 4, index, fetched)),
        OkStatus());
    EXPECT_EQ(machine.engine->stats().num_started, 3);
    // Another op failed. The next program's kernels know nothing of ours.
    machine.engine->Leave(machine.LeaveOf(first));
    EXPECT_EQ(machine.engine->stats().num_started, 0);
    machine.streams->Enqueue(machine.xla[0], [&] {
      EXPECT_TRUE(on_device == in) << seed;
      EXPECT_TRUE(on_host == out) << seed;
      EXPECT_TRUE(fetched == row) << seed;
      for (Buffer* const buffer : {&on_device, &from_device, &fetched}) {
        std::ranges::fill(*buffer, std::byte{7});
      }
    });
    ASSERT_TRUE(machine.streams->Drain());
    for (const Buffer* const buffer : {&on_device, &from_device, &fetched}) {
      ASSERT_TRUE(std::ranges::count(*buffer, std::byte{7}) ==
                  std::ssize(*buffer))
          << seed;
    }
    ASSERT_TRUE(on_host == out) << seed;
    EXPECT_EQ(machine.engine->Done(machine.DoneOf(first)).code(),
              StatusCode::kFailedPrecondition);
    EXPECT_EQ(machine.engine->stats().num_in_flight, 0);
  }
}

TEST(StreamEngineTest, ARunThatEndsLeavesOthersAlone) {
  Machine machine(2);
  const Buffer host = Random(900 * kKiB, 1);
  Buffer of_other_run(host.size());
  Buffer of_other_gpu(host.size());
  const CopyRequest other_gpu = machine.H2d(1, host, of_other_gpu);
  CopyRequest other_run = machine.H2d(0, host, of_other_run);
  other_run.run = 2;
  ASSERT_EQ(machine.engine->Start(other_run), OkStatus());
  ASSERT_EQ(machine.engine->Start(other_gpu), OkStatus());
  machine.engine->Leave({.gpu = 0, .stream = machine.xla[0], .run = 1});
  EXPECT_EQ(machine.engine->stats().num_started, 2);
  ASSERT_EQ(machine.engine->Done(machine.DoneOf(other_run)), OkStatus());
  ASSERT_EQ(machine.engine->Done(machine.DoneOf(other_gpu)), OkStatus());
  machine.engine->Leave(machine.LeaveOf(other_run));
  machine.engine->Leave(machine.LeaveOf(other_gpu));
  EXPECT_EQ(machine.engine->stats().num_started, 0);
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_EQ(of_other_run, host);
  EXPECT_EQ(of_other_gpu, host);
}

TEST(StreamEngineTest, ATransferInFlightDoesNotSpoilItsBuffersNextUse) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine(2, seed);
    const Buffer old = Random(900 * kKiB, seed);
    const Buffer fresh = Random(900 * kKiB, seed + 1);
    Buffer device(old.size());
    ASSERT_EQ(machine.engine->Start(machine.H2d(0, old, device)), OkStatus());
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
  const StreamStats stats = machine.engine->stats();
  EXPECT_EQ(stats.num_plain, 3);
  // Its link carried them all the same.
  const auto direct = std::ranges::find_if(
      stats.paths, [](const PathStats& one) { return one.size_bytes > 0; });
  ASSERT_NE(direct, stats.paths.end());
  EXPECT_EQ(direct->path.relay, topo::kNoRelay);
  EXPECT_EQ(direct->size_bytes, 2 * 900 * kKiB + 9 * kKiB);
  EXPECT_EQ(direct->num_blocks, 3);
  EXPECT_EQ(device, big);
}

TEST(StreamEngineTest, DisabledStartsAreOneCopyBesideTheProgram) {
  StreamSettings settings = SmallBlocks();
  settings.is_disabled = true;
  Machine machine(2, 1, settings);
  const Buffer host = Random(900 * kKiB, 1);
  Buffer device(host.size());
  Buffer row(host.size() / 3);
  Buffer stack = host;
  int32_t index = 1;
  bool has_computed = false;
  const CopyRequest start = machine.H2d(0, host, device);
  RowRequest row_start = machine.Row(0, stack, 3, index, row);
  ASSERT_EQ(machine.engine->Start(start), OkStatus());
  ASSERT_EQ(machine.engine->StartRow(row_start), OkStatus());
  machine.streams->Enqueue(machine.xla[0], [] {}, [&] { return has_computed; });
  EXPECT_EQ(machine.streams->num_copies, 1);
  EXPECT_EQ(machine.streams->num_yields, 0);
  // While the program computes:
  EXPECT_FALSE(machine.streams->Drain());
  EXPECT_EQ(device, host);
  EXPECT_TRUE(
      std::ranges::equal(row, std::span(host).subspan(row.size(), row.size())));
  has_computed = true;
  ASSERT_EQ(machine.engine->Done(machine.DoneOf(start)), OkStatus());
  ASSERT_EQ(machine.engine->Done({.call = "done",
                                  .gpu = 0,
                                  .stream = machine.xla[0],
                                  .run = row_start.run,
                                  .buffer = row.data()}),
            OkStatus());
  EXPECT_TRUE(machine.streams->Drain());
  EXPECT_EQ(machine.engine->stats().num_pooled, 0);
  EXPECT_EQ(machine.BytesOver(0, 1), 0);
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

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "engine/stream_engine.h"
#include "engine/stream_testing.h"

// What the engine measures and remembers.

namespace turbobus::engine {
namespace {

TEST(StreamReportsTest, PathsAreMeasuredAloneAndTogether) {
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

TEST(StreamReportsTest, NothingGrowsOverManyTransfers) {
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

TEST(StreamReportsTest, TimesAreAsExactAfterDaysAsInTheFirstSecond) {
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

TEST(StreamReportsTest, TracesHaveEveryBlockOnItsLane) {
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

}  // namespace
}  // namespace turbobus::engine

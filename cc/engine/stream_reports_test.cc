#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string>
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
  std::map<int64_t, int64_t> sizes;  // by offset
  const std::vector<StreamSpan> spans = machine.engine->TakeSpans();
  for (const StreamSpan& span : spans) {
    EXPECT_LE(span.start_ns, span.end_ns);
    EXPECT_TRUE(sizes.emplace(span.offset_bytes, span.size_bytes).second);
  }
  int64_t end = 0;
  for (const auto& [offset, size] : sizes) {
    EXPECT_EQ(offset, end);
    end += size;
  }
  EXPECT_EQ(end, static_cast<int64_t>(host.size()));
  EXPECT_GT(spans.size(), 30);
  EXPECT_TRUE(machine.engine->TakeSpans().empty());
}

TEST(StreamReportsTest, TracesTellARelaysHopsApart) {
  for (int i = 0; i < 24; ++i) {
    StreamSettings settings = SmallBlocks();
    settings.is_traced = true;
    settings.relay_streams = static_cast<RelayStreams>(i % 3);
    Machine machine(2, i, settings);
    Buffer host = Random(2048 * kKiB, i);
    Buffer device(host.size());
    ASSERT_EQ(machine.engine->Copy(i % 2 == 0 ? machine.H2d(0, host, device)
                                              : machine.D2h(0, device, host)),
              OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    int num_relayed = 0;
    StreamSpan last = {.relayed_ns = INT64_MIN, .end_ns = INT64_MIN};
    for (const StreamSpan& span : machine.engine->TakeSpans()) {
      if (span.relayed_ns == 0) continue;  // the own link's
      ++num_relayed;
      EXPECT_LE(span.start_ns, span.relayed_ns) << i;
      EXPECT_LE(span.relayed_ns, span.resumed_ns) << i;
      EXPECT_LE(span.resumed_ns, span.end_ns) << i;
      if (settings.relay_streams == RelayStreams::kPerLeg) {
        // A stream each: one block at a time.
        EXPECT_LE(last.relayed_ns, span.start_ns) << i;
        EXPECT_LE(last.end_ns, span.resumed_ns) << i;
      }
      last = span;
    }
    EXPECT_GT(num_relayed, 10) << i;
  }
}

TEST(StreamReportsTest, BlocksThatARelayRefusesAreCountedAndTraced) {
  StreamSettings settings = SmallBlocks();
  settings.is_traced = true;
  Machine machine(2, 1, settings);
  const Buffer host = Random(2048 * kKiB, 1);
  Buffer device(host.size());
  machine.engine->InjectFault(1);
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, device)), OkStatus());
  StreamStats stats = machine.engine->stats();
  EXPECT_GT(stats.num_blocks_in_flight, 16);
  EXPECT_EQ(stats.paths[0].bytes_in_flight + stats.paths[1].bytes_in_flight,
            2048 * kKiB);
  ASSERT_TRUE(machine.streams->Drain());
  stats = machine.engine->stats();
  const TransferRecord record = machine.engine->recent_transfers().back();
  // 1 MiB was to be relayed, the last blocks smaller than 64 KiB; one went.
  EXPECT_GE(stats.num_reissued_blocks, 15);
  EXPECT_EQ(record.num_reissued_blocks, stats.num_reissued_blocks);
  EXPECT_EQ(record.reissue_reason, "injected fault");
  EXPECT_TRUE(record.status.ok());
  EXPECT_EQ(stats.paths[1].num_failed, 1);
  EXPECT_EQ(stats.paths[1].num_blocks, 1);
  EXPECT_EQ(stats.paths[0].num_blocks + 1, record.num_blocks);
  EXPECT_EQ(stats.num_blocks_in_flight, 0);
  EXPECT_EQ(stats.num_failed, 0);
  int64_t bytes = 0;
  for (const StreamSpan& span : machine.engine->TakeSpans()) {
    bytes += span.size_bytes;
  }
  EXPECT_EQ(bytes, 2048 * kKiB);
}

TEST(StreamReportsTest, TransfersThatFailAreNotCountedAsCompleted) {
  Machine machine(2);
  const Buffer large = Random(1024 * kKiB, 1);
  const Buffer small = Random(9 * kKiB, 1);
  Buffer device(large.size());
  machine.streams->copy_error = Internal("an illegal memory access");
  EXPECT_FALSE(machine.engine->Copy(machine.H2d(0, large, device)).ok());
  EXPECT_FALSE(machine.engine->Copy(machine.H2d(0, small, device)).ok());
  ASSERT_TRUE(machine.streams->Drain());
  const StreamStats stats = machine.engine->stats();
  EXPECT_EQ(stats.num_failed, 2);
  EXPECT_EQ(stats.num_completed + stats.num_plain, 0);
  EXPECT_EQ(stats.completed_bytes, 0);
  const TransferRecord record = machine.engine->recent_transfers().back();
  EXPECT_EQ(record.status.code(), StatusCode::kInternal);
}

TEST(StreamReportsTest, RowsThatCoresCopyCountForTheirLink) {
  Machine machine(2);
  const int64_t row_bytes = 400 * kKiB;
  Buffer stack = Random(2 * row_bytes, 1);
  Buffer row(static_cast<size_t>(row_bytes));
  int32_t index = 1;
  StreamSettings settings = SmallBlocks();
  for (const bool is_direct : {true, false}) {
    settings.split =
        is_direct ? SplitPolicy::kDirect : SplitPolicy::kFinishTime;
    ASSERT_EQ(machine.engine->SetSettings(settings), OkStatus());
    ASSERT_EQ(machine.engine->CopyRow(machine.Row(0, stack, 2, index, row)),
              OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
  }
  const StreamStats stats = machine.engine->stats();
  EXPECT_EQ(stats.num_plain, 1);
  EXPECT_EQ(stats.plain_bytes, row_bytes);
  EXPECT_EQ(stats.num_pooled + stats.num_completed, 1);
  EXPECT_GT(stats.paths[1].size_bytes, 0);
  EXPECT_EQ(stats.paths[0].size_bytes + stats.paths[1].size_bytes,
            2 * row_bytes);
}

TEST(StreamReportsTest, WhyARelayWasLeftOutIsSaidUntilItIsNot) {
  Machine machine(2);
  const Buffer host = Random(1024 * kKiB, 1);
  Buffer reached(host.size());
  Buffer unreached(host.size());
  machine.streams->unreachable.insert(unreached.data());
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, unreached)), OkStatus());
  EXPECT_EQ(machine.engine->stats().paths[1].left_out,
            "the relay cannot reach this memory");
  EXPECT_EQ(machine.engine->stats().paths[1].dropped, "");
  ASSERT_EQ(machine.engine->Copy(machine.H2d(0, host, reached)), OkStatus());
  ASSERT_TRUE(machine.streams->Drain());
  EXPECT_EQ(machine.engine->stats().paths[1].left_out, "");
  EXPECT_GT(machine.BytesOver(0, 1), 0);
  EXPECT_EQ(unreached, host);
}

TEST(StreamReportsTest, StagingIsCountedByLender) {
  Machine machine(3, 1, SmallBlocks(),
                  [](FakeStreams& streams) { streams.no_memory.insert(2); });
  const std::map<int, int64_t> expected = {{0, 256 * kKiB}, {1, 256 * kKiB}};
  EXPECT_EQ(machine.engine->stats().staging_bytes, expected);
}

}  // namespace
}  // namespace turbobus::engine

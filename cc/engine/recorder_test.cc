#include "engine/recorder.h"

#include <gtest/gtest.h>

namespace turbobus::engine {
namespace {

constexpr int64_t kMs = 1'000'000;

topo::Path DirectPath() {
  topo::Path path;
  path.bandwidth_bytes_per_s = 1e9;
  path.links = {0};
  return path;
}

topo::Path RelayPath() {
  topo::Path path = DirectPath();
  path.relay = 1;
  path.links = {1, 2};
  return path;
}

Options WithTrace(int64_t capacity) {
  Options options;
  options.trace_capacity = capacity;
  return options;
}

sched::Block BlockOf(int lane, int64_t size_bytes) {
  sched::Block block;
  block.transfer = 7;
  block.lane = lane;
  block.size_bytes = size_bytes;
  return block;
}

TEST(RecorderTest, BusyTimeIsTheUnionOfWhatOverlaps) {
  Recorder recorder({DirectPath()}, 1.25, {}, 0);
  for (const auto& [start, end] : {std::pair{0, 2}, {1, 3}, {5, 6}}) {
    recorder.OnIssue(BlockOf(0, 1000));
    recorder.OnBlockDone(
        BlockOf(0, 1000), 0,
        {.id = 1, .start_ns = start * kMs, .end_ns = end * kMs});
  }
  const Stats stats = recorder.Get(9);
  EXPECT_EQ(stats.lanes[0].busy_ns, 4 * kMs);
  EXPECT_EQ(stats.links[0].busy_ns, 4 * kMs);
  EXPECT_EQ(stats.lanes[0].num_bytes, 3000);
  EXPECT_EQ(stats.lanes[0].queued_ns, (0 + 1 + 5) * kMs);
  EXPECT_EQ(stats.lanes[0].num_bytes_in_flight, 0);
}

TEST(RecorderTest, ABlockIsLateAgainstItsTurnOnTheLane) {
  Recorder recorder({DirectPath()}, 1.25, {}, 0);
  const auto done = [&](int64_t start_ns, int64_t end_ns) {
    recorder.OnIssue(BlockOf(0, 1'000'000));  // one millisecond
    recorder.OnBlockDone(BlockOf(0, 1'000'000), 0,
                         {.id = 1, .start_ns = start_ns, .end_ns = end_ns});
    return recorder.Get(0).lanes[0].num_late_blocks;
  };
  EXPECT_EQ(done(0, kMs), 0);
  EXPECT_EQ(done(0, 2 * kMs), 0)
      << "worked on beside the first, and came after it";
  EXPECT_EQ(done(2 * kMs, 4 * kMs), 1);
}

TEST(RecorderTest, ARelayedBlockIsOwedBothHopsAndCountsOnBothLinks) {
  Options options;
  options.labels = {.lanes = {"through gpu1"},
                    .links = {{.name = "fabric", .bandwidth_bytes_per_s = 1e9},
                              {.name = "pcie1", .bandwidth_bytes_per_s = 1e9}},
                    .lane_links = {{{0}, {1}}}};
  Recorder recorder({RelayPath()}, 1.25, options, 0);
  recorder.OnIssue(BlockOf(0, 1'000'000));
  recorder.OnBlockDone(BlockOf(0, 1'000'000), 0,
                       {.id = 1,
                        .start_ns = 0,
                        .relayed_ns = kMs,
                        .resumed_ns = 3 * kMs / 2,
                        .end_ns = 5 * kMs / 2});
  const Stats stats = recorder.Get(0);
  EXPECT_EQ(stats.lanes[0].name, "through gpu1");
  EXPECT_EQ(stats.lanes[0].num_late_blocks, 0);
  EXPECT_EQ(stats.links[0].busy_ns, kMs);
  EXPECT_EQ(stats.links[1].busy_ns, kMs);
}

TEST(RecorderTest, FailedBlocksCountNowhereButAsFailures) {
  Recorder recorder({DirectPath()}, 1.25, {}, 0);
  recorder.OnIssue(BlockOf(0, 1000));
  recorder.OnBlockDone(BlockOf(0, 1000), 0,
                       {.id = 1, .status = Internal("broken"), .end_ns = kMs});
  const Stats stats = recorder.Get(0);
  EXPECT_EQ(stats.lanes[0].num_failed_blocks, 1);
  EXPECT_EQ(stats.lanes[0].reason, "broken");
  EXPECT_EQ(stats.lanes[0].num_bytes, 0);
  EXPECT_EQ(stats.links[0].num_bytes, 0);
}

TEST(RecorderTest, TheTraceKeepsTheNewestEvents) {
  Recorder recorder({DirectPath()}, 1.25, WithTrace(3), 0);
  for (int i = 0; i < 5; ++i) {
    recorder.OnIssue(BlockOf(0, i));
    recorder.OnBlockDone(BlockOf(0, i), 0, {.id = 1});
  }
  const auto trace = recorder.Trace();
  ASSERT_EQ(trace.size(), 3U);
  EXPECT_EQ(trace.front().size_bytes, 2);
  EXPECT_EQ(trace.back().size_bytes, 4);
}

TEST(RecorderTest, RecentTransfersAreBounded) {
  Recorder recorder({DirectPath()}, 1.25, {}, 0);
  for (int64_t id = 1; id <= 1000; ++id) {
    recorder.OnSubmit();
    TransferStats transfer;
    transfer.id = id;
    if (id % 3 == 0) transfer.status = Cancelled("");
    recorder.OnTransferDone(transfer);
  }
  const Stats stats = recorder.Get(0);
  EXPECT_EQ(stats.recent_transfers.size(), Recorder::kNumRecentTransfers);
  EXPECT_EQ(stats.recent_transfers.back().id, 1000);
  EXPECT_EQ(stats.num_completed + stats.num_cancelled, 1000);
  EXPECT_EQ(stats.num_in_flight, 0);
  EXPECT_TRUE(recorder.Trace().empty());
}

TEST(RecorderTest, DefaultLabelsNameLanesByGpuDirectionAndRelay) {
  topo::Path back = RelayPath();
  back.direction = topo::Direction::kD2h;
  const Labels labels = DefaultLabels({DirectPath(), back});
  EXPECT_EQ(labels.lanes,
            (std::vector<std::string>{"gpu0 h2d", "gpu0 d2h via gpu1"}));
  EXPECT_EQ(labels.links[labels.lane_links[1][0][1]].name, "link2 d2h");
}

}  // namespace
}  // namespace turbobus::engine

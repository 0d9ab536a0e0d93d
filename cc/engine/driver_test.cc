#include "engine/driver.h"

#include <gtest/gtest.h>

#include <deque>
#include <set>

namespace turbobus::engine {
namespace {

constexpr int kDirect = 0;
constexpr int kRelay = 1;
constexpr int64_t kSize = 1000;

/// Each transfer is one block, tried on the lanes of `lane_order` in turn.
class FakeScheduler final : public sched::Scheduler {
 public:
  Status Submit(const sched::Transfer& transfer, int64_t) override {
    if (!submit_status.ok()) return submit_status;
    if (!is_deaf) Queue(transfer.id, transfer.size_bytes);
    live.insert(transfer.id);
    return OkStatus();
  }
  std::optional<sched::Block> Next(int64_t) override {
    if (queue.empty()) return std::nullopt;
    sched::Block block = queue.front();
    queue.pop_front();
    block.id = next_block++;
    while (removed.contains(lane_order.front())) lane_order.pop_front();
    block.lane = lane_order.front();
    lane_order.pop_front();
    in_flight[block.id] = block;
    return block;
  }
  Status Complete(sched::BlockId id, int64_t now_ns) override {
    last_now_ns = now_ns;
    if (!in_flight.contains(id)) return NotFound("block");
    End(in_flight.extract(id).mapped().transfer);
    return OkStatus();
  }
  Status Fail(sched::BlockId id, int64_t) override {
    if (!in_flight.contains(id)) return NotFound("block");
    const sched::Block block = in_flight.extract(id).mapped();
    if (cancelled.contains(block.transfer)) {
      End(block.transfer);
    } else {
      Queue(block.transfer, block.size_bytes);
    }
    return OkStatus();
  }
  Status Cancel(sched::TransferId id, int64_t) override {
    cancelled.insert(id);
    std::erase_if(queue,
                  [&](const auto& block) { return block.transfer == id; });
    for (const auto& [block_id, block] : in_flight) {
      if (block.transfer == id) return OkStatus();
    }
    End(id);
    return OkStatus();
  }
  Status RemoveLane(int lane, int64_t) override {
    removed.insert(lane);
    std::erase_if(in_flight, [&](const auto& entry) {
      if (entry.second.lane != lane) return false;
      if (is_stranding) {
        stranded.push_back(entry.second.transfer);
      } else {
        Queue(entry.second.transfer, entry.second.size_bytes);
      }
      return true;
    });
    return OkStatus();
  }
  std::vector<sched::Finished> TakeFinished() override {
    return std::exchange(finished, {});
  }
  std::vector<sched::TransferId> TakeStranded() override {
    return std::exchange(stranded, {});
  }
  std::optional<int64_t> NextWakeupNs() const override { return std::nullopt; }
  bool is_idle() const override { return live.empty(); }
  void Rescan() override {}
  sched::LaneState lane_state(int) const override { return {}; }

  void Queue(sched::TransferId id, int64_t size_bytes) {
    sched::Block block;
    block.transfer = id;
    block.size_bytes = size_bytes;
    queue.push_back(block);
  }
  void End(sched::TransferId id) {
    if (live.erase(id) > 0) finished.push_back({id, cancelled.contains(id)});
  }

  std::deque<int> lane_order;
  Status submit_status;
  bool is_deaf = false;
  bool is_stranding = false;
  std::deque<sched::Block> queue;
  std::map<sched::BlockId, sched::Block> in_flight;
  std::set<sched::TransferId> live;
  std::set<sched::TransferId> cancelled;
  std::set<int> removed;
  std::vector<sched::Finished> finished;
  std::vector<sched::TransferId> stranded;
  sched::BlockId next_block = 1;
  int64_t last_now_ns = 0;
};

/// Blocks are done when the test says so.
class FakeTransport final : public transport::Transport {
 public:
  FakeTransport() : paths_(2) {
    for (topo::Path& path : paths_) path.bandwidth_bytes_per_s = 1e9;
    paths_[kRelay].relay = 1;
  }
  const std::vector<topo::Path>& paths() const override { return paths_; }
  Status Issue(const transport::BlockCopy& copy) override {
    if (!issue_status.ok()) return issue_status;
    issued.push_back(copy);
    return OkStatus();
  }
  int Wait(std::span<transport::BlockDone> done, int64_t) override {
    int num_done = 0;
    while (!results.empty()) {
      done[num_done++] = results.front();
      results.pop_front();
    }
    return num_done;
  }
  void Drop(uint64_t id) override { dropped.push_back(id); }
  void Wake() override {}
  int64_t NowNs() const override { return now_ns; }

  void Finish(size_t index, Status status = OkStatus(), int64_t end_ns = 50) {
    results.push_back({.id = issued[index].id,
                       .status = std::move(status),
                       .start_ns = 10,
                       .end_ns = end_ns});
  }

  std::vector<transport::BlockCopy> issued;
  std::deque<transport::BlockDone> results;
  std::vector<uint64_t> dropped;
  Status issue_status;
  int64_t now_ns = 1;

 private:
  std::vector<topo::Path> paths_;
};

class DriverTest : public testing::Test {
 protected:
  DriverTest()
      : scheduler(new FakeScheduler),
        recorder(transport.paths(), 1.25, {}, 0),
        driver(std::unique_ptr<sched::Scheduler>(scheduler), transport,
               recorder, [](std::function<void(Status)> done, Status status) {
                 done(std::move(status));
               }) {
    scheduler->lane_order = {kRelay, kDirect, kRelay, kDirect, kRelay, kDirect};
  }

  void Submit(sched::TransferId id) {
    Request request;
    request.src = src.data();
    request.dst = dst.data();
    request.size_bytes = kSize;
    request.done = [this, id](const Status& status) { outcomes[id] = status; };
    recorder.OnSubmit();
    driver.Submit(id, std::move(request), 1);
    driver.Issue();
  }

  void Step() {
    driver.WaitAndCollect();
    driver.Issue();
  }

  TransferStats LastTransfer() {
    return recorder.Get(0).recent_transfers.back();
  }

  std::vector<char> src = std::vector<char>(kSize);
  std::vector<char> dst = std::vector<char>(kSize);
  FakeScheduler* scheduler;
  FakeTransport transport;
  Recorder recorder;
  Driver driver;
  std::map<sched::TransferId, Status> outcomes;
};

TEST_F(DriverTest, ATransferIsOverWhenItsLastBlockIs) {
  Submit(1);
  ASSERT_EQ(transport.issued.size(), 1U);
  EXPECT_EQ(transport.issued[0].dst, dst.data());
  EXPECT_TRUE(outcomes.empty());
  transport.now_ns = 100;
  transport.Finish(0);
  Step();
  EXPECT_TRUE(outcomes.at(1).ok());
  EXPECT_TRUE(driver.is_idle());
  EXPECT_EQ(LastTransfer().num_relayed_bytes, kSize);
  EXPECT_EQ(scheduler->last_now_ns, 50)
      << "the scheduler sees when the block ended";
}

TEST_F(DriverTest, ABlockThatFailsOnARelayIsIssuedAgainBeforeAnyoneIsReleased) {
  Submit(1);
  transport.Finish(0, Internal("staging is full"));
  Step();
  EXPECT_TRUE(outcomes.empty());
  ASSERT_EQ(transport.issued.size(), 2U);
  EXPECT_EQ(transport.issued[1].lane, kDirect);
  transport.Finish(1);
  Step();
  EXPECT_TRUE(outcomes.at(1).ok());
  EXPECT_EQ(LastTransfer().num_reissued_blocks, 1);
  EXPECT_EQ(LastTransfer().reissue_reason, "staging is full");
}

TEST_F(DriverTest, BytesThatFailOnTheDirectLaneTooFailTheirTransfer) {
  Submit(1);
  transport.Finish(0, Internal("relay broken"));
  Step();
  transport.Finish(1, Internal("direct broken"));
  Step();
  ASSERT_EQ(transport.issued.size(), 2U) << "no third attempt";
  EXPECT_EQ(outcomes.at(1).code(), StatusCode::kInternal);
  EXPECT_NE(outcomes.at(1).message().find("direct broken"), std::string::npos);
  EXPECT_TRUE(driver.is_idle());
}

TEST_F(DriverTest, RelaysThatFailInTurnAreTriedUntilTheDirectLaneWas) {
  scheduler->lane_order = {kRelay, kRelay, kRelay, kDirect};
  Submit(1);
  for (size_t i = 0; i < 3; ++i) {
    transport.Finish(i, Internal("relay broken"));
    Step();
    EXPECT_TRUE(outcomes.empty());
  }
  transport.Finish(3);
  Step();
  EXPECT_TRUE(outcomes.at(1).ok());
}

TEST_F(DriverTest, ABlockOfAVanishedLaneIsAwaitedAlthoughItsBytesHaveArrived) {
  scheduler->lane_order = {kRelay, kRelay, kDirect, kDirect};
  Submit(1);
  Submit(2);
  transport.Finish(0, Unavailable("gone"));
  Step();
  // Both were on the relay; both are on the direct lane now.
  ASSERT_EQ(transport.issued.size(), 4U);
  transport.Finish(2);
  transport.Finish(3);
  Step();
  EXPECT_TRUE(outcomes.at(1).ok());
  EXPECT_FALSE(outcomes.contains(2)) << "the relay may still write its bytes";
  transport.Finish(1, Unavailable("gone"));
  Step();
  EXPECT_TRUE(outcomes.at(2).ok());
  EXPECT_TRUE(recorder.Get(0).lanes[kRelay].is_removed);
  EXPECT_EQ(recorder.Get(0).num_reissued_blocks, 2);
}

TEST_F(DriverTest, ALaneThatRefusesABlockIsTakenOut) {
  transport.issue_status = Unavailable("unplugged");
  scheduler->lane_order = {kRelay};
  scheduler->is_stranding = true;
  Submit(1);
  EXPECT_EQ(outcomes.at(1).code(), StatusCode::kUnavailable);
  EXPECT_NE(outcomes.at(1).message().find("unplugged"), std::string::npos);
}

TEST_F(DriverTest, AStrandedTransferFailsWithTheReasonOnceNobodyWritesToIt) {
  scheduler->lane_order = {kDirect, kDirect};
  scheduler->is_stranding = true;
  Submit(1);
  Submit(2);
  transport.Finish(0, Unavailable("cable cut"));
  Step();
  EXPECT_EQ(outcomes.at(1).code(), StatusCode::kUnavailable);
  EXPECT_NE(outcomes.at(1).message().find("cable cut"), std::string::npos);
  EXPECT_FALSE(outcomes.contains(2));
  transport.Finish(1);
  Step();
  EXPECT_EQ(outcomes.at(2).code(), StatusCode::kUnavailable);
}

TEST_F(DriverTest, ACancelledTransferDropsItsBlocksAndWaitsForThem) {
  Submit(1);
  driver.Cancel(1);
  driver.Issue();
  EXPECT_EQ(transport.dropped.size(), 1U);
  EXPECT_TRUE(outcomes.empty());
  transport.Finish(0, Cancelled("dropped"));
  Step();
  EXPECT_EQ(outcomes.at(1).code(), StatusCode::kCancelled);
  EXPECT_EQ(recorder.Get(0).num_reissued_blocks, 0);
  driver.Cancel(1);  // over by now
}

TEST_F(DriverTest, FailAllEndsEverythingWithTheReason) {
  Submit(1);
  Submit(2);
  driver.FailAll(Unavailable("shutting down"));
  driver.Cancel(1);
  transport.Finish(0);
  transport.Finish(1, Cancelled("dropped"));
  Step();
  EXPECT_EQ(outcomes.at(1), Unavailable("shutting down"));
  EXPECT_EQ(outcomes.at(2), Unavailable("shutting down"));
  EXPECT_EQ(recorder.Get(0).num_failed, 2);
}

TEST_F(DriverTest, ASchedulerThatStallsFailsItsTransfersInsteadOfHangingThem) {
  scheduler->is_deaf = true;
  Submit(1);
  EXPECT_EQ(outcomes.at(1).code(), StatusCode::kInternal);
}

TEST_F(DriverTest, ATransferThatEndsWithoutAllItsBytesIsAnError) {
  scheduler->is_deaf = true;
  scheduler->finished.push_back({1, false});
  Submit(1);
  EXPECT_EQ(outcomes.at(1).message(),
            "transfer 1 ended with 0 of 1000 bytes copied");
}

TEST_F(DriverTest, ATransferThatTheSchedulerRefusesFails) {
  scheduler->submit_status = InvalidArgument("gpu: unknown");
  Submit(1);
  EXPECT_EQ(outcomes.at(1), InvalidArgument("gpu: unknown"));
}

}  // namespace
}  // namespace turbobus::engine

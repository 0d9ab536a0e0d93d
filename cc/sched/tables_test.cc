#include "sched/tables.h"

#include <gtest/gtest.h>

#include <functional>

#include "sched/virtual_node.h"

namespace turbobus::sched {
namespace {

std::string ErrorOf(const std::function<void(Config&)>& spoil) {
  Config config = AllToAll({1, 1});
  spoil(config);
  const Status status = Scheduler::Create(config).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  return status.message();
}

TEST(TablesTest, ConfigsThatCannotWorkAreRefusedByTheNameOfTheField) {
  EXPECT_EQ(ErrorOf([](Config& c) { c.lanes.clear(); }),
            "lanes: expected at least one lane, got none");
  EXPECT_EQ(
      ErrorOf([](Config& c) { c.lanes[1].path.bandwidth_bytes_per_s = 0; }),
      "lanes[1].path.bandwidth_bytes_per_s: expected bytes per second in "
      "[1, 1e15], got 0.000000");
  EXPECT_EQ(ErrorOf([](Config& c) { c.lanes[0].window_bytes = -1; }),
            "lanes[0].window_bytes: expected a positive number, got -1");
  EXPECT_EQ(ErrorOf([](Config& c) { c.lanes[0].path.latency_ns = -5; }),
            "lanes[0].path.latency_ns: expected nanoseconds >= 0, got -5");
  EXPECT_EQ(ErrorOf([](Config& c) { c.lanes[0].path.gpu = -1; }),
            "lanes[0].path.gpu: expected a GPU's index, got -1");
  EXPECT_EQ(ErrorOf([](Config& c) { c.lanes[1].path.relay = 0; }),
            "lanes[1].path.relay: expected another GPU than 0 (the lane's "
            "own), or -1 for none, got 0");
  EXPECT_EQ(ErrorOf([](Config& c) { c.lanes[3].caps = {0}; }),
            "lanes[3].caps: there is no cap 0 among the 0 of `caps`");
  EXPECT_EQ(ErrorOf([](Config& c) { c.lanes[3].path = c.lanes[0].path; }),
            "lanes[3].path: same GPU, relay, direction and NUMA node as "
            "lanes[0]; give each path one lane");
  EXPECT_EQ(ErrorOf([](Config& c) { c.block_bytes = 0; }),
            "block_bytes: expected a positive number, got 0");
  EXPECT_EQ(ErrorOf([](Config& c) { c.chunk_bytes = 1; }),
            "chunk_bytes: expected at least one block of 1048576, got 1");
  EXPECT_EQ(ErrorOf([](Config& c) { c.late_factor = 0.5; }),
            "late_factor: expected a number >= 1, got 0.500000");
  EXPECT_EQ(ErrorOf([](Config& c) { c.max_probe_interval_ns = 1; }),
            "max_probe_interval_ns: expected at least probe_interval_ns = "
            "5000000, got 1");
  EXPECT_EQ(ErrorOf([](Config& c) { c.caps = {{"uplink", -1}}; }),
            "caps[0].bandwidth_bytes_per_s: expected bytes per second in "
            "[1, 1e15], got -1.000000");
}

TEST(TablesTest, ATransferGoesToTheLanesOfItsNumaNodeOrElseOfTheFirst) {
  Config config = AllToAll({1, 1});
  for (LaneSpec lane : AllToAll({1, 1}).lanes) {
    lane.path.numa_node = 1;
    config.lanes.push_back(lane);
  }
  const Tables tables = *Tables::Create(config);
  const auto numa_of = [&](int numa_node) {
    const int q = tables.FindQueue(0, topo::Direction::kH2d, numa_node);
    return tables.queues[q].numa_node;
  };
  EXPECT_EQ(numa_of(0), 0);
  EXPECT_EQ(numa_of(1), 1);
  EXPECT_EQ(numa_of(7), 0);
  EXPECT_EQ(tables.FindQueue(0, topo::Direction::kD2h, 0), kNone);
  EXPECT_EQ(tables.FindQueue(2, topo::Direction::kH2d, 0), kNone);
}

}  // namespace
}  // namespace turbobus::sched

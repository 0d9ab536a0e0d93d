#include "engine/engine.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "engine/host_engine.h"
#include "engine/scheduled_engine.h"

namespace turbobus::engine {
namespace {

using Bytes = std::vector<unsigned char>;

// Four GPUs in a ring of fast links, two on each of two memories.
constexpr char kFourGpus[] = R"({
  "format": "jax_turbobus/topology", "version": 1, "name": "four",
  "numa_nodes": [{"id": "numa0", "memory_bytes_per_s": 9e9}, {"id": "numa1"}],
  "gpus": [{"id": "gpu0", "numa_node": "numa0"}, {"id": "gpu1", "numa_node": "numa0"},
           {"id": "gpu2", "numa_node": "numa1"}, {"id": "gpu3", "numa_node": "numa1"}],
  "links": [
    {"id": "upi", "type": "upi", "a": "numa0", "b": "numa1",
     "a_to_b_bytes_per_s": 8e9, "b_to_a_bytes_per_s": 8e9},
    {"id": "pcie0", "type": "pcie", "a": "numa0", "b": "gpu0",
     "a_to_b_bytes_per_s": 4e9, "b_to_a_bytes_per_s": 4e9},
    {"id": "pcie1", "type": "pcie", "a": "numa0", "b": "gpu1",
     "a_to_b_bytes_per_s": 4e9, "b_to_a_bytes_per_s": 4e9},
    {"id": "pcie2", "type": "pcie", "a": "numa1", "b": "gpu2",
     "a_to_b_bytes_per_s": 4e9, "b_to_a_bytes_per_s": 4e9},
    {"id": "pcie3", "type": "pcie", "a": "numa1", "b": "gpu3",
     "a_to_b_bytes_per_s": 4e9, "b_to_a_bytes_per_s": 4e9},
    {"id": "nv01", "type": "nvlink", "a": "gpu0", "b": "gpu1",
     "a_to_b_bytes_per_s": 2e10, "b_to_a_bytes_per_s": 2e10},
    {"id": "nv23", "type": "nvlink", "a": "gpu2", "b": "gpu3",
     "a_to_b_bytes_per_s": 2e10, "b_to_a_bytes_per_s": 2e10},
    {"id": "nv02", "type": "nvlink", "a": "gpu0", "b": "gpu2",
     "a_to_b_bytes_per_s": 2e10, "b_to_a_bytes_per_s": 2e10}]
})";

HostEngine Make(const HostEngineOptions& options) {
  auto topology = topo::Topology::FromJson(kFourGpus, "test");
  EXPECT_TRUE(topology.ok()) << topology.status();
  auto engine = CreateHostEngine(*topology, options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::move(engine).value();
}

Bytes Pattern(size_t size, unsigned seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = ((i + seed) * 2654435761U) >> 11;
  return bytes;
}

/// A transfer between two buffers of its own.
struct Running {
  explicit Running(size_t size, unsigned seed = 1)
      : src(Pattern(size, seed)), dst(size) {}

  Request ToRequest(int gpu = 0,
                    topo::Direction direction = topo::Direction::kH2d) {
    Request request;
    request.gpu = gpu;
    request.direction = direction;
    request.src = src.data();
    request.dst = dst.data();
    request.size_bytes = std::ssize(src);
    request.done = [this](Status status) {
      result.set_value(std::move(status));
    };
    return request;
  }

  Status Wait() { return result.get_future().get(); }

  Bytes src;
  Bytes dst;
  std::promise<Status> result;
};

class EngineModesTest
    : public testing::TestWithParam<std::tuple<sched::Mode, bool>> {
 protected:
  static HostEngineOptions Options() {
    HostEngineOptions options;
    options.mode = std::get<0>(GetParam());
    options.is_emulated = std::get<1>(GetParam());
    options.block_bytes = 64 << 10;
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Modes, EngineModesTest,
    testing::Combine(testing::Values(sched::Mode::kFreeRunning,
                                     sched::Mode::kLockStep),
                     testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param) == sched::Mode::kLockStep
                             ? "LockStep"
                             : "FreeRunning") +
             (std::get<1>(info.param) ? "Emulated" : "AtMemorySpeed");
    });

TEST_P(EngineModesTest, BytesOfEveryGpuAndDirectionArrive) {
  const HostEngine host = Make(Options());
  std::vector<std::unique_ptr<Running>> running;
  for (int gpu = 0; gpu < 4; ++gpu) {
    for (const auto direction :
         {topo::Direction::kH2d, topo::Direction::kD2h}) {
      running.push_back(std::make_unique<Running>(2'000'003, gpu));
      ASSERT_TRUE(
          host.engine->Submit(running.back()->ToRequest(gpu, direction)).ok());
    }
  }
  for (auto& one : running) {
    EXPECT_TRUE(one->Wait().ok());
    EXPECT_EQ(one->src, one->dst);
  }
}

// Many threads submit, cancel and wait while lanes fail, slow down and vanish;
// whatever ends well has its bytes, whatever does not says why, nothing is
// left.
TEST_P(EngineModesTest, StressWithCancelsAndFaultsLosesNothing) {
  constexpr int kNumThreads = 6;
  constexpr int kNumTransfers = 80;
  HostEngineOptions options = Options();
  options.trace_capacity = 100;
  HostEngine host = Make(options);
  std::atomic<int> num_ended = 0;
  std::atomic<bool> is_over = false;
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < kNumTransfers; ++i) {
      Running one(random() % 400'000, seed + i);
      const auto direction = static_cast<topo::Direction>(random() % 2);
      const auto id =
          host.engine->Submit(one.ToRequest(random() % 4, direction));
      ASSERT_TRUE(id.ok()) << id.status();
      if (random() % 8 == 0) {
        EXPECT_TRUE(host.engine->Cancel(*id).ok());
      }
      const Status status = one.Wait();
      ++num_ended;
      if (status.ok()) {
        ASSERT_EQ(one.src, one.dst);
      } else {
        ASSERT_TRUE(status.code() == StatusCode::kCancelled ||
                    status.code() == StatusCode::kInternal)
            << status;
      }
    }
  };
  std::thread saboteur([&] {
    std::mt19937 random(99);
    const auto& paths = host.transport->paths();
    for (int round = 0; !is_over; ++round) {
      host.transport->FailBlocks(-1, random() % 20, 1);
      const int lane = random() % paths.size();
      host.transport->SlowLane(lane, 1 + random() % 3);
      // Relays vanish for good, but never a direct lane: that is another test.
      if (round % 20 == 19 && paths[lane].is_relay()) {
        host.transport->VanishLane(lane);
      }
      static_cast<void>(host.engine->GetStats());
      static_cast<void>(host.engine->Trace());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < kNumThreads; ++seed) {
    threads.emplace_back(work, seed);
  }
  for (std::thread& thread : threads) thread.join();
  is_over = true;
  saboteur.join();
  EXPECT_EQ(num_ended, kNumThreads * kNumTransfers);
  const Stats stats = host.engine->GetStats();
  EXPECT_EQ(stats.num_submitted, kNumThreads * kNumTransfers);
  EXPECT_EQ(stats.num_completed + stats.num_failed + stats.num_cancelled,
            stats.num_submitted);
  EXPECT_EQ(stats.num_in_flight, 0);
  EXPECT_EQ(stats.num_blocks_in_flight, 0);
  EXPECT_EQ(host.transport->num_blocks_in_flight(), 0);
  EXPECT_EQ(host.engine->Trace().size(), 100U);
}

TEST_P(EngineModesTest, VanishingLanesEndInErrorsOrTheRightBytes) {
  HostEngineOptions options = Options();
  options.rate_scale = 0.05;
  const HostEngine host = Make(options);
  std::vector<std::unique_ptr<Running>> running;
  for (int i = 0; i < 8; ++i) {
    running.push_back(std::make_unique<Running>(1'500'000, i));
    ASSERT_TRUE(host.engine->Submit(running.back()->ToRequest(i % 4)).ok());
  }
  for (int lane = 0; lane < std::ssize(host.transport->paths()); ++lane) {
    host.transport->VanishLane(lane);
  }
  for (auto& one : running) {
    const Status status = one->Wait();
    if (status.ok()) {
      EXPECT_EQ(one->src, one->dst);
    } else {
      EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
    }
  }
  Running late(1000);
  ASSERT_TRUE(host.engine->Submit(late.ToRequest()).ok());
  EXPECT_EQ(late.Wait().code(), StatusCode::kUnavailable);
}

TEST_P(EngineModesTest, AbortEndsEverythingWithTheReason) {
  HostEngineOptions options = Options();
  options.rate_scale = 0.001;
  const HostEngine host = Make(options);
  std::vector<std::unique_ptr<Running>> running;
  for (int i = 0; i < 6; ++i) {
    running.push_back(std::make_unique<Running>(4'000'000, i));
    ASSERT_TRUE(host.engine->Submit(running.back()->ToRequest(i % 4)).ok());
  }
  host.engine->Abort(Unavailable("the node goes down"));
  for (auto& one : running) {
    const Status status = one->Wait();
    // At memory speed some may have been faster.
    if (!status.ok()) {
      EXPECT_EQ(status, Unavailable("the node goes down"));
    }
  }
  Running late(1000);
  EXPECT_EQ(host.engine->Submit(late.ToRequest()).status(),
            Unavailable("the node goes down"));
}

TEST(EngineTest, TheDestructorDrains) {
  HostEngineOptions options;
  options.is_emulated = true;
  options.rate_scale = 0.01;
  HostEngine host = Make(options);
  Running one(1 << 20);
  std::atomic<bool> is_done = false;
  Request request = one.ToRequest();
  request.done = [&](const Status& status) {
    EXPECT_TRUE(status.ok());
    is_done = true;
  };
  ASSERT_TRUE(host.engine->Submit(std::move(request)).ok());
  host.engine.reset();
  EXPECT_TRUE(is_done);
  EXPECT_EQ(one.src, one.dst);
}

TEST(EngineTest, ADoneMayDropTheLastReferenceToTheEngine) {
  for (int i = 0; i < 20; ++i) {
    HostEngine host = Make({});
    std::shared_ptr<Engine> engine = std::move(host.engine);
    Running one(100'000);
    Running other(100'000);
    Engine* const raw = engine.get();
    Request request = one.ToRequest();
    std::promise<void> is_let_go;
    request.done = [&one, engine = std::move(engine),
                    let_go =
                        is_let_go.get_future().share()](Status status) mutable {
      let_go.wait();
      engine.reset();
      one.result.set_value(std::move(status));
    };
    ASSERT_TRUE(raw->Submit(std::move(request)).ok());
    ASSERT_TRUE(raw->Submit(other.ToRequest(1)).ok());
    is_let_go.set_value();
    EXPECT_TRUE(one.Wait().ok());
    EXPECT_TRUE(other.Wait().ok());
  }
}

TEST(EngineTest, CallbacksThatWaitForEachOtherAllRun) {
  const HostEngine host = Make({});
  constexpr int kNum = 12;
  std::vector<std::unique_ptr<Running>> running;
  std::atomic<int> num_arrived = 0;
  std::promise<void> all;
  const std::shared_future<void> all_arrived = all.get_future().share();
  for (int i = 0; i < kNum; ++i) {
    running.push_back(std::make_unique<Running>(1000));
    Running& one = *running.back();
    Request request = one.ToRequest(i % 4);
    request.done = [&, all_arrived](Status status) {
      if (++num_arrived == kNum) all.set_value();
      all_arrived.wait();
      one.result.set_value(std::move(status));
    };
    ASSERT_TRUE(host.engine->Submit(std::move(request)).ok());
  }
  for (auto& one : running) EXPECT_TRUE(one->Wait().ok());
}

TEST(EngineTest, BadRequestsNameTheField) {
  const HostEngine host = Make({});
  Running one(1000);
  const auto submit = [&](auto change) {
    Request request = one.ToRequest();
    change(request);
    return host.engine->Submit(std::move(request)).status().message();
  };
  EXPECT_EQ(submit([](Request& r) { r.size_bytes = -1; }),
            "size_bytes: expected at least 0, got -1");
  EXPECT_EQ(submit([](Request& r) { r.src = nullptr; }),
            "src: expected the address of 1000 bytes, got null");
  EXPECT_EQ(submit([](Request& r) { r.dst = nullptr; }),
            "dst: expected the address of 1000 bytes, got null");
  EXPECT_NE(
      submit([](Request& r) { r.gpu = 4; }).find("gpu: no lane serves gpu 4"),
      std::string::npos);
  EXPECT_NE(submit([](Request& r) { r.numa_node = 1; }).find("numa_node: "),
            std::string::npos);
  EXPECT_EQ(host.engine->Cancel(99).code(), StatusCode::kNotFound);
  EXPECT_EQ(host.engine->GetStats().num_submitted, 0);
}

TEST(EngineTest, AnEngineNeedsALaneForEachPath) {
  auto topology = topo::Topology::FromJson(kFourGpus, "test");
  auto transport = transport::host::HostTransport::Create(
      topology->Paths(0, topo::Direction::kH2d),
      transport::host::UnlimitedLinks(
          std::ssize(topology->Paths(0, topo::Direction::kH2d))));
  ASSERT_TRUE(transport.ok());
  EXPECT_EQ(Engine::Create({}, std::move(transport).value()).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Engine::Create({}, nullptr).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(EngineTest, MiddlingTransfersUseRelaysAndReportThem) {
  HostEngineOptions options;
  options.is_emulated = true;
  options.rate_scale = 0.05;
  options.block_bytes = 256 << 10;
  const HostEngine host = Make(options);
  Running one(8 << 20);
  ASSERT_TRUE(host.engine->Submit(one.ToRequest()).ok());
  EXPECT_TRUE(one.Wait().ok());
  const Stats stats = host.engine->GetStats();
  ASSERT_EQ(stats.recent_transfers.size(), 1U);
  EXPECT_GT(stats.recent_transfers[0].num_relayed_bytes, 2 << 20);
  int64_t num_bytes = 0;
  for (const LaneStats& lane : stats.lanes) num_bytes += lane.num_bytes;
  EXPECT_EQ(num_bytes, 8 << 20);
}

TEST(ProcessEngineTest, TheChildOfAForkHasNoneAndItsCopiesSaySo) {
  SetProcessEngine(Make({}).engine);
  std::shared_ptr<Engine> engine = ProcessEngine();
  ASSERT_NE(engine, nullptr);
  // Threads that hold the slot's lock while the fork happens.
  std::atomic<bool> is_over = false;
  std::thread user([&] {
    while (!is_over) static_cast<void>(ProcessEngine());
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      Running one(1000);
      bool is_right = ProcessEngine() == nullptr;
      is_right &= engine->Submit(one.ToRequest()).status().code() ==
                  StatusCode::kFailedPrecondition;
      is_right &= engine->Cancel(1).code() == StatusCode::kFailedPrecondition;
      is_right &= engine->GetStats().lanes.empty() && engine->Trace().empty();
      engine->Abort(Internal("child"));
      engine.reset();
      _exit(is_right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
  }
  is_over = true;
  user.join();
  Running one(100'000);
  ASSERT_TRUE(engine->Submit(one.ToRequest()).ok());
  EXPECT_TRUE(one.Wait().ok());
  SetProcessEngine(nullptr);
  EXPECT_EQ(ProcessEngine(), nullptr);
}

}  // namespace
}  // namespace turbobus::engine

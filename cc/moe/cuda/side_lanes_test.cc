#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/side_streams.h"

namespace turbobus::moe::cuda {
namespace {

using std::chrono::milliseconds;

class SideLanes : public testing::GpuTest {
 protected:
  void SetUp() override {
    testing::GpuTest::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(cudaStreamCreateWithFlags(&program_, cudaStreamNonBlocking),
              cudaSuccess);
  }
  void TearDown() override {
    gate_.Open();
    if (program_ != nullptr) (void)cudaStreamDestroy(program_);
  }
  SideStreams::Program Program(int64_t run_id = 1) const {
    return {0, run_id, program_};
  }

  /// What `enqueue(stream)` enqueues, beside the program.
  template <typename Enqueue>
  Status Run(const SideStreams::Program& program, const void* result,
             Enqueue enqueue) {
    return streams_.Run(
        program, {result},
        [&](const StatusOr<SideStreams::Lane*>& lane) -> Status {
          TB_RETURN_IF_ERROR(lane.status());
          enqueue((*lane)->stream());
          return OkStatus();
        });
  }

  /// Whether a stream comes to what is enqueued now, within half a second.
  static bool GoesOn(cudaStream_t stream) {
    for (int i = 0; i < 500; ++i) {
      if (cudaStreamQuery(stream) == cudaSuccess) return true;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return false;
  }

  cudaStream_t program_ = nullptr;
  SideStreams streams_;
  testing::Gate gate_;
};

TEST_F(SideLanes, ACombineIsUnderWayBesideADispatch) {
  const int results[2] = {};
  cudaStream_t second = nullptr;
  const Status first = Run(Program(), &results[0],
                           [&](cudaStream_t stream) { gate_.Block(stream); });
  const Status next = Run(Program(), &results[1],
                          [&](cudaStream_t stream) { second = stream; });
  EXPECT_TRUE(GoesOn(second));
  gate_.Open();
  EXPECT_TRUE(first.ok() && next.ok()) << first << next;
  for (const int& result : results) {
    EXPECT_TRUE(streams_.Join(Program(), {&result}).ok());
  }
  EXPECT_EQ(streams_.num_under_way(), 0);
  EXPECT_EQ(cudaStreamSynchronize(program_), cudaSuccess);
}

/// Some other op ends the program: its buffers are another's when its stream
/// has come so far.
TEST_F(SideLanes, AProgramThatEndsWaitsForWhatItHasNotJoined) {
  const int results[3] = {};
  ASSERT_TRUE(Run(Program(1), &results[0], [](cudaStream_t) {}).ok());
  ASSERT_TRUE(Run(Program(1), &results[1], [&](cudaStream_t stream) {
                gate_.Block(stream);
              }).ok());
  ASSERT_TRUE(Run(Program(2), &results[2], [](cudaStream_t) {}).ok());
  ASSERT_TRUE(streams_.Join(Program(1), {&results[0]}).ok());
  EXPECT_TRUE(GoesOn(program_));
  streams_.Leave(Program(1));
  EXPECT_EQ(streams_.num_under_way(), 1);
  EXPECT_FALSE(GoesOn(program_));
  gate_.Open();
  EXPECT_TRUE(GoesOn(program_));
  EXPECT_FALSE(streams_.Join(Program(1), {&results[1]}).ok());
  EXPECT_TRUE(streams_.Join(Program(2), {&results[2]}).ok());
}

/// It fails itself, with something enqueued.
TEST_F(SideLanes, AnExchangeThatFailsIsAwaitedToo) {
  const int result = 0;
  const Status status =
      streams_.Run(Program(), {&result},
                   [&](const StatusOr<SideStreams::Lane*>& lane) -> Status {
                     TB_RETURN_IF_ERROR(lane.status());
                     gate_.Block((*lane)->stream());
                     return Internal("a test");
                   });
  EXPECT_EQ(status.message(), "a test");
  EXPECT_TRUE(GoesOn(program_));
  streams_.Leave(Program());
  EXPECT_FALSE(GoesOn(program_));
  gate_.Open();
  EXPECT_TRUE(GoesOn(program_));
}

TEST_F(SideLanes, ThereAreNoMoreThanWanted) {
  SideStreams streams(3);
  std::vector<cudaStream_t> used;
  for (int i = 0; i < 12; ++i) {
    const Status status = streams.Run(
        Program(), {&used}, [&](const StatusOr<SideStreams::Lane*>& lane) {
          if (lane.ok()) used.push_back((*lane)->stream());
          return lane.status();
        });
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(streams.Join(Program(), {&used}).ok());
  }
  ASSERT_EQ(used.size(), 12u);
  for (int i = 3; i < 12; ++i) EXPECT_EQ(used[i], used[i - 3]);
  EXPECT_NE(used[0], used[1]);
  EXPECT_NE(used[1], used[2]);
}

}  // namespace
}  // namespace turbobus::moe::cuda

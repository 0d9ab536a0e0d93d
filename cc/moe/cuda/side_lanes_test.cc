#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/side_streams.h"

namespace turbobus::moe::cuda {
namespace {

using std::chrono::milliseconds;

class SideLanes : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
    ASSERT_EQ(cudaStreamCreateWithFlags(&program_, cudaStreamNonBlocking),
              cudaSuccess);
  }
  void TearDown() override {
    if (program_ != nullptr) (void)cudaStreamDestroy(program_);
  }
  SideStreams::Program Program() const { return {0, 1, program_}; }

  cudaStream_t program_ = nullptr;
};

TEST_F(SideLanes, ACombineIsUnderWayBesideADispatch) {
  SideStreams streams;
  std::atomic<bool> is_free = false;
  cudaEvent_t second = nullptr;
  ASSERT_EQ(cudaEventCreate(&second), cudaSuccess);
  const int results[2] = {};
  const auto run = [&](const int* result, auto enqueue) {
    return streams.Run(Program(), {result},
                       [&](const StatusOr<SideStreams::Lane*>& lane) -> Status {
                         TB_RETURN_IF_ERROR(lane.status());
                         enqueue((*lane)->stream());
                         return OkStatus();
                       });
  };
  const Status first = run(&results[0], [&](cudaStream_t stream) {
    (void)cudaLaunchHostFunc(
        stream,
        [](void* flag) {
          while (!*static_cast<std::atomic<bool>*>(flag)) {
            std::this_thread::sleep_for(milliseconds(1));
          }
        },
        &is_free);
  });
  const Status next = run(&results[1], [&](cudaStream_t stream) {
    (void)cudaEventRecord(second, stream);
  });
  bool is_done = false;
  for (int i = 0; i < 500 && !is_done; ++i) {
    is_done = cudaEventQuery(second) == cudaSuccess;
    std::this_thread::sleep_for(milliseconds(1));
  }
  is_free = true;
  EXPECT_TRUE(is_done);
  EXPECT_TRUE(first.ok() && next.ok()) << first << next;
  for (const int& result : results) {
    EXPECT_TRUE(streams.Join(Program(), {&result}).ok());
  }
  EXPECT_EQ(cudaStreamSynchronize(program_), cudaSuccess);
  (void)cudaEventDestroy(second);
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

#include "moe/cuda/side_streams.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "moe/blocking_meeting.h"

// What becomes of an exchange that cannot begin: this process has no GPU, so
// that every call of CUDA fails.

namespace turbobus::moe::cuda {
namespace {

[[maybe_unused]] const int kNoGpu =
    setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);

TEST(SideStreams, AnExchangeThatCannotBeginTellsTheRanksThatWaitForIt) {
  BlockingMeeting meeting(std::chrono::seconds(5));
  const CallKey key = {.run_id = 1};
  Status peer;
  std::thread waiting([&] {
    peer =
        meeting.Meet(key, 0, {.op = "dispatch", .rank = 1, .num_ranks = 2}, {})
            .status();
  });
  SideStreams streams;
  int num_calls = 0;
  const Status status = streams.Run(
      {.device = 0, .run_id = 1, .stream = nullptr}, {&meeting},
      [&](const StatusOr<SideStreams::Lane*>& lane) -> Status {
        ++num_calls;
        if (lane.ok()) return OkStatus();
        meeting.Fail(key, {.op = "dispatch", .rank = 0, .num_ranks = 2},
                     lane.status());
        return lane.status();
      });
  waiting.join();
  EXPECT_EQ(num_calls, 1);
  EXPECT_EQ(status.code(), StatusCode::kInternal) << status;
  EXPECT_EQ(peer.code(), StatusCode::kInternal) << peer;
  EXPECT_NE(peer.message().find("cuda"), std::string::npos) << peer;
  const Status joined = streams.Join({.device = 0, .run_id = 1}, {&meeting});
  EXPECT_EQ(joined.code(), StatusCode::kFailedPrecondition) << joined;
}

}  // namespace
}  // namespace turbobus::moe::cuda

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "moe/cuda/packed_exchange.h"
#include "moe/cuda/packed_runs.h"

// What a packed exchange that has failed leaves behind.

namespace turbobus::moe::cuda {
namespace {

using testing::Bytes;
using testing::Case;
using testing::DispatchOf;
using testing::ExpectOk;
using testing::How;
using testing::MemoryOf;
using testing::RankMemory;
using testing::Ranks;
using testing::ScratchFor;
using testing::WiringOf;

// Large slots: when the last is filled, much is still to be read out of them.
[[maybe_unused]] const int kSlots =
    setenv("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", "4194304", /*overwrite=*/1);
[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

/// A rank fails when everything is enqueued, and only the last meeting is
/// missing: its program ends, and its memory is another's, into which what
/// peers push must not come any more.
TEST(PackedFailed, ABroadcastWritesNothingBehindItsProgramsBack) {
  if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  constexpr uint8_t kOthers = 0xee;
  const Case one = {.name = "", .num_tokens = 20000, .hidden = 512};
  Ranks ranks(WiringOf(one.num_ranks, How::kBroadcast),
              std::chrono::seconds(5));
  std::vector<RankMemory> memory;
  for (int r = 0; r < one.num_ranks; ++r) {
    memory.push_back(MemoryOf(one, ranks, r, 0x5a));
    ScratchFor(ranks.CallerOf(r, 0), DispatchOf(one, r, memory[r]), memory[r]);
  }
  const auto dispatch = [&](const Caller& caller) {
    RankMemory& own = memory[caller.rank];
    GpuDispatch call = DispatchOf(one, caller.rank, own);
    call.scratch = own.scratch[0].as();
    return RunDispatch(caller, call);
  };
  // Once to warm up: CUDA waits for the GPU when it loads a kernel.
  ExpectOk(ranks.Call(dispatch));

  std::atomic<bool> is_free = false;
  std::atomic<int> num_back = 0;
  std::thread frees([&] {
    const auto limit =
        std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (num_back < one.num_ranks &&
           std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    is_free = true;
  });
  const std::vector<Status> said = ranks.Call([&](Caller caller) {
    (void)cudaLaunchHostFunc(
        caller.stream,
        [](void* flag) {
          while (!*static_cast<std::atomic<bool>*>(flag)) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        },
        &is_free);
    int num_meetings = 0;
    caller.on_step = [&](const char* step) {
      if (caller.rank != 1 || step != std::string("enqueued")) return;
      if (++num_meetings != 3) return;
      caller.meeting->Fail(caller.key,
                           {.op = caller.op, .rank = 1, .num_ranks = 2},
                           Internal("a test"));
    };
    const Status status = dispatch(caller);
    // The next program has the memory.
    const testing::DeviceBytes& scratch = memory[caller.rank].scratch[0];
    (void)cudaMemsetAsync(scratch.as(), kOthers, scratch.size(), caller.stream);
    ++num_back;
    return status;
  });
  frees.join();
  for (int r = 0; r < one.num_ranks; ++r) {
    EXPECT_EQ(said[r].code(), StatusCode::kInternal) << said[r];
    const testing::DeviceBytes& scratch = memory[r].scratch[0];
    EXPECT_TRUE(scratch.Read() == Bytes(scratch.size(), kOthers)) << r;
  }
  ExpectOk(ranks.Call(dispatch));
}

}  // namespace
}  // namespace turbobus::moe::cuda

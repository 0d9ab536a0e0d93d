#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <string>
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
using testing::MemoryOfAll;
using testing::RankMemory;
using testing::Ranks;
using testing::ScratchFor;
using testing::WiringOf;

// Large slots: when the last is filled, much is still to be read out of them.
[[maybe_unused]] const int kSlots =
    setenv("JAX_TURBOBUS_EXCHANGE_SLOT_BYTES", "4194304", /*overwrite=*/1);
[[maybe_unused]] const int kApart =
    setenv("JAX_TURBOBUS_PEER_ACCESS", "0", /*overwrite=*/1);

using PackedFailed = testing::GpuTest;

/// A rank fails when everything is enqueued, and only the last meeting is
/// missing: its program ends, and its memory is another's, into which what
/// peers push must not come any more.
TEST_F(PackedFailed, ABroadcastWritesNothingBehindItsProgramsBack) {
  constexpr uint8_t kOthers = 0xee;
  const Case one = {.name = "", .num_tokens = 20000, .hidden = 512};
  Ranks ranks(WiringOf(one.num_ranks, How::kBroadcast),
              std::chrono::seconds(5));
  std::vector<RankMemory> memory = MemoryOfAll(one, ranks);
  for (int r = 0; r < one.num_ranks; ++r) {
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

  std::atomic<int> num_back = 0;
  testing::Gate gate;
  const std::future<bool> opened = gate.OpenWhen(
      [&] { return num_back == one.num_ranks; }, std::chrono::seconds(2));
  const std::vector<Status> said = ranks.Call([&](Caller caller) {
    gate.Block(caller.stream);
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
  opened.wait();
  for (int r = 0; r < one.num_ranks; ++r) {
    EXPECT_EQ(said[r].code(), StatusCode::kInternal) << said[r];
    const testing::DeviceBytes& scratch = memory[r].scratch[0];
    EXPECT_TRUE(scratch.Read() == Bytes(scratch.size(), kOthers)) << r;
  }
  ExpectOk(ranks.Call(dispatch));
}

}  // namespace
}  // namespace turbobus::moe::cuda

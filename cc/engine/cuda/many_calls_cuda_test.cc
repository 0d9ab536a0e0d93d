#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine/cuda/cuda_testing.h"

// That calls leave nothing behind: TURBOBUS_TEST_CALLS says how many of them.

namespace turbobus::engine {
namespace {

using topo::Direction;

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return resident * 4096;
}

int64_t NumDescriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

class CudaManyCallsTest : public CudaEngineTest {
 protected:
  struct InUse {
    /// Streams, events and memory of the engine's.
    int num_made;
    int64_t device_bytes;
    int64_t resident_bytes;
    int64_t num_descriptors;
    int64_t num_in_flight;
  };

  InUse Look() {
    size_t free = 0;
    size_t total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return {.num_made = streams_->num_made(),
            .device_bytes = static_cast<int64_t>(total - free),
            .resident_bytes = ResidentBytes(),
            .num_descriptors = NumDescriptors(),
            .num_in_flight = engine_->stats().num_in_flight};
  }
};

TEST_F(CudaManyCallsTest, ThousandsOfCallsKeepNothing) {
  const char* const wanted = std::getenv("TURBOBUS_TEST_CALLS");
  const int num_calls = wanted == nullptr ? 1000 : std::atoi(wanted);
  constexpr int32_t kRows = 4;
  constexpr int64_t kMost = 900 * kKiB + 3;
  constexpr int64_t kRowBytes = kMost / kRows;
  constexpr int64_t kSizes[] = {1, 5000, 130 * kKiB, 260 * kKiB + 1, kMost};
  const Bytes bytes = RandomBytes(kMost, 8);
  const Pinned in(bytes);
  const Pinned out(bytes.size());
  const OnDevice device(0, bytes.size());
  const OnDevice row(0, static_cast<size_t>(kRowBytes));
  const OnDevice index(0, Bytes{2, 0, 0, 0});
  Bytes pageable(static_cast<size_t>(kMost));

  int64_t run = 1;
  int num_refused = 0;
  const auto ok = [](const Status& status) { ASSERT_EQ(status, OkStatus()); };
  const auto refused = [&](const Status& status, StatusCode code) {
    ASSERT_EQ(status.code(), code) << status;
    ++num_refused;
  };
  // One of every kind of call in turn, some of them twice.
  const auto call = [&](int i) {
    const int64_t size = kSizes[i / 8 % std::size(kSizes)];
    CopyRequest h2d =
        Request(0, Direction::kH2d, in.data(), device.data(), size);
    CopyRequest d2h =
        Request(0, Direction::kD2h, device.data(), out.data(), size);
    RowRequest fetch = Row(0, in, kRows, index, row, kRowBytes);
    RowRequest store = Row(0, out, kRows, index, row, kRowBytes, true);
    h2d.run = d2h.run = fetch.run = store.run = ++run;
    switch (i % 8) {
      case 0:
        return ok(engine_->Copy(h2d));
      case 1:
        return ok(engine_->Copy(d2h));
      case 2:
        ok(engine_->Start(h2d));
        return ok(engine_->Done(DoneOf(h2d)));
      case 3:
        ok(engine_->Start(d2h));
        return ok(engine_->Done(DoneOf(d2h)));
      case 4:
        ok(engine_->CopyRow(fetch));
        return ok(engine_->CopyRow(store));
      case 5: {
        ok(engine_->StartRow(fetch));
        DoneRequest done = DoneOf(h2d);
        done.buffer = row.data();
        return ok(engine_->Done(done));
      }
      case 6: {
        // Its start was for another buffer: the program ends here.
        ok(engine_->Start(h2d));
        DoneRequest done = DoneOf(h2d);
        done.buffer = out.data();
        return refused(engine_->Done(done), StatusCode::kFailedPrecondition);
      }
      default:
        fetch.row.stack = reinterpret_cast<std::byte*>(pageable.data());
        return refused(engine_->CopyRow(fetch), StatusCode::kInvalidArgument);
    }
  };
  const auto calls = [&](int count) {
    for (int i = 0; i < count && !HasFatalFailure(); ++i) {
      call(i);
      // A host that runs ahead, but not without end.
      if (i % 20 != 19) continue;
      ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
    }
    ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
  };
  // What is under way at once decides how many events there are.
  calls(200);
  const InUse before = Look();
  calls(num_calls);
  const InUse after = Look();
  EXPECT_EQ(num_refused, (num_calls + 200) / 8 * 2);
  EXPECT_GT(RelayedBytes(), 0);
  EXPECT_LE(after.num_made, before.num_made + 16);
  EXPECT_LE(after.device_bytes, before.device_bytes + (1 << 20));
  EXPECT_LE(after.resident_bytes, before.resident_bytes + (8 << 20));
  EXPECT_EQ(after.num_descriptors, before.num_descriptors);
  EXPECT_EQ(after.num_in_flight, 0);
  EXPECT_EQ(device.Read(), bytes);
}

}  // namespace
}  // namespace turbobus::engine

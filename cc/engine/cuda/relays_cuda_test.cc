#include <cstdint>
#include <string>
#include <vector>

#include "engine/cuda/cuda_testing.h"

// Lent links on real cards; one is enough (engine/cuda/shared_cards.h).

namespace turbobus::engine {
namespace {

using topo::Direction;

class CudaRelaysTest : public CudaEngineTest {};

class CudaBorrowersTest : public CudaEngineTest,
                          public testing::WithParamInterface<RelayStreams> {
 protected:
  StreamSettings Settings() override {
    StreamSettings settings = SmallBlocks();
    settings.relay_streams = GetParam();
    return settings;
  }
};

TEST_P(CudaBorrowersTest, GetTheirBytesBothWaysOverEachOther) {
  // After some more they would stop lending, being busy together.
  for (int round = 0; round < 3; ++round) {
    const int64_t size = (400 + 250 * round) * kKiB + round;
    const Bytes bytes[] = {RandomBytes(size, 2 * round),
                           RandomBytes(size, 2 * round + 1)};
    const Pinned in[] = {Pinned(bytes[0]), Pinned(bytes[1])};
    const Pinned out[] = {Pinned(bytes[0].size()), Pinned(bytes[1].size())};
    const OnDevice there[] = {OnDevice(0, bytes[0].size()),
                              OnDevice(1, bytes[1].size())};
    const auto issue = [&](int gpu, Direction direction) {
      std::byte* const device = there[gpu].data();
      return engine_->Copy(
          direction == Direction::kH2d
              ? Request(gpu, direction, in[gpu].data(), device, size)
              : Request(gpu, direction, device, out[gpu].data(), size));
    };
    // All of them at once, and each GPU first in turn.
    const int first = round % 2;
    for (const int gpu : {first, 1 - first}) {
      ASSERT_EQ(issue(gpu, Direction::kH2d), OkStatus());
    }
    for (const int gpu : {1 - first, first}) {
      ASSERT_EQ(issue(gpu, Direction::kD2h), OkStatus());
    }
    for (int gpu = 0; gpu < 2; ++gpu) {
      ASSERT_CUDA(cudaStreamSynchronize(xla_[gpu]));
      ASSERT_EQ(there[gpu].Read(), bytes[gpu]) << round;
      ASSERT_EQ(out[gpu].Read(), bytes[gpu]) << round;
    }
  }
  EXPECT_GT(RelayedBytes(), 0);
}

INSTANTIATE_TEST_SUITE_P(RelayStreams, CudaBorrowersTest,
                         testing::Values(RelayStreams::kPerLeg,
                                         RelayStreams::kPerSlot,
                                         RelayStreams::kPerSlotLoose));

TEST_F(CudaRelaysTest, ARelayThatFailsInTheMiddleLosesNothing) {
  constexpr int64_t kSize = 900 * kKiB + 3;
  const Bytes bytes = RandomBytes(kSize, 9);
  const Pinned in(bytes);
  for (const Direction direction : {Direction::kH2d, Direction::kD2h}) {
    const Pinned out(bytes.size());
    const OnDevice device(0, bytes);
    const OnDevice empty(0, bytes.size());
    engine_->InjectFault(1);
    if (direction == Direction::kH2d) {
      ASSERT_EQ(
          engine_->Copy(Request(0, direction, in.data(), empty.data(), kSize)),
          OkStatus());
    } else {
      ASSERT_EQ(engine_->Copy(
                    Request(0, direction, device.data(), out.data(), kSize)),
                OkStatus());
    }
    ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
    EXPECT_EQ(direction == Direction::kH2d ? empty.Read() : out.Read(), bytes);
    bool is_dropped = false;
    for (const PathStats& path : engine_->stats().paths) {
      if (path.path.gpu != 0 || path.path.relay != 1) continue;
      is_dropped |= path.path.direction == direction && !path.dropped.empty();
    }
    EXPECT_TRUE(is_dropped);
    const TransferRecord record = engine_->recent_transfers().back();
    EXPECT_GT(record.num_reissued_blocks, 0);
    EXPECT_EQ(record.reissue_reason, "injected fault");
    EXPECT_EQ(record.status, OkStatus());
  }
}

TEST_F(CudaRelaysTest, StartedRowsAreRightWhateverWasGuessed) {
  constexpr int32_t kRows = 5;
  constexpr int64_t kRowBytes = 300 * kKiB;
  const Bytes bytes = RandomBytes(kRows * kRowBytes, 10);
  const Pinned stack(bytes);
  const OnDevice row(0, static_cast<size_t>(kRowBytes));
  const OnDevice index(0, sizeof(int32_t));
  for (const int32_t i : {0, 1, 2, 3, 4, 2, 2, 0, 1, 4, 0, 1, 2}) {
    ASSERT_CUDA(
        cudaMemcpy(index.data(), &i, sizeof(i), cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const RowRequest request = Row(0, stack, kRows, index, row, kRowBytes);
    ASSERT_EQ(engine_->StartRow(request), OkStatus());
    ASSERT_EQ(engine_->Done({.call = "done",
                             .gpu = 0,
                             .stream = xla_[0],
                             .run = 1,
                             .buffer = row.data()}),
              OkStatus());
    ASSERT_CUDA(cudaStreamSynchronize(xla_[0]));
    const auto begin = bytes.begin() + i * kRowBytes;
    ASSERT_EQ(row.Read(), Bytes(begin, begin + kRowBytes)) << i;
  }
  const StreamStats stats = engine_->stats();
  EXPECT_GT(stats.num_guesses_right, 0);
  EXPECT_GT(stats.num_guesses_wrong, 0);
}

}  // namespace
}  // namespace turbobus::engine

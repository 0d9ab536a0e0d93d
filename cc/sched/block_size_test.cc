#include "sched/block_size.h"

#include <gtest/gtest.h>

namespace turbobus::sched {
namespace {

constexpr int64_t kMib = 1 << 20;

TEST(BlockSizeTest, UnderHalfABlockIsSmallAndStaysWhole) {
  EXPECT_TRUE(IsSmall(8 * kMib - 1, 16 * kMib));
  EXPECT_FALSE(IsSmall(8 * kMib, 16 * kMib));
  EXPECT_EQ(BlockBytes(8 * kMib - 1, 16 * kMib), 8 * kMib - 1);
  EXPECT_EQ(BlockBytes(1, 16 * kMib), 1);
}

TEST(BlockSizeTest, MiddlingTransfersAreCutIntoAboutSixteen) {
  EXPECT_EQ(BlockBytes(8 * kMib, 16 * kMib), kMib);
  EXPECT_EQ(BlockBytes(16 * kMib, 16 * kMib), kMib);
  EXPECT_EQ(BlockBytes(64 * kMib, 16 * kMib), 4 * kMib);
  EXPECT_EQ(BlockBytes(65 * kMib, 16 * kMib), 4 * kMib + kBlockAlignment);
}

TEST(BlockSizeTest, LongTransfersGetFullBlocks) {
  EXPECT_EQ(BlockBytes(256 * kMib, 16 * kMib), 16 * kMib);
  EXPECT_EQ(BlockBytes(int64_t{1} << 40, 16 * kMib), 16 * kMib);
}

TEST(BlockSizeTest, ConfiguredBlocksBelowOneMebibyteAreTakenAsTheyAre) {
  EXPECT_EQ(BlockBytes(1000, 64), 64);
  EXPECT_EQ(BlockBytes(32, 64), 64);
}

}  // namespace
}  // namespace turbobus::sched

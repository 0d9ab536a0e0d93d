#include "offload/layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace turbobus::offload {
namespace {

TEST(PackedSizeBytes, PacksElementsBelowAByte) {
  EXPECT_EQ(*PackedSizeBytes(0, 4), 0);
  EXPECT_EQ(*PackedSizeBytes(1, 4), 1);
  EXPECT_EQ(*PackedSizeBytes(7, 4), 4);
  EXPECT_EQ(*PackedSizeBytes(9, 2), 3);
  EXPECT_EQ(*PackedSizeBytes(9, 1), 2);
  EXPECT_EQ(*PackedSizeBytes(5, 8), 5);
  EXPECT_EQ(*PackedSizeBytes(5, 128), 80);
}

TEST(PackedSizeBytes, CountsBeyondFourGibibytes) {
  EXPECT_EQ(*PackedSizeBytes(int64_t{3} << 31, 32), int64_t{3} << 33);
}

TEST(PackedSizeBytes, RefusesWhatDoesNotFit) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(PackedSizeBytes(-1, 8).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(PackedSizeBytes(1, 0).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(PackedSizeBytes(kMax, 16).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(PackedSizeBytes(kMax, 4).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(SliceRow, IsOnePieceAlongTheMajorAxis) {
  const RowSlice slice = *SliceRow(std::vector<int64_t>{4, 3, 5}, 0, 2, 32);
  EXPECT_EQ(slice.offset_bytes, 2 * 60);
  EXPECT_EQ(slice.num_pieces, 1);
  EXPECT_EQ(slice.piece_bytes, 60);
}

TEST(SliceRow, IsManyPiecesAlongAMinorAxis) {
  const RowSlice slice = *SliceRow(std::vector<int64_t>{4, 3, 5}, 1, 2, 16);
  EXPECT_EQ(slice.offset_bytes, 2 * 10);
  EXPECT_EQ(slice.num_pieces, 4);
  EXPECT_EQ(slice.piece_bytes, 10);
  EXPECT_EQ(slice.stride_bytes, 30);
  EXPECT_EQ(slice.size_bytes(), 40);
}

TEST(SliceRow, ClampsTheIndex) {
  const std::vector<int64_t> dims = {4, 8};
  EXPECT_EQ(SliceRow(dims, 0, -3, 8)->offset_bytes, 0);
  EXPECT_EQ(SliceRow(dims, 0, 9, 8)->offset_bytes, 3 * 8);
}

TEST(SliceRow, ReachesBeyondFourGibibytes) {
  // 96 layers of 3 GiB: row 95 starts at 285 GiB.
  const RowSlice slice =
      *SliceRow(std::vector<int64_t>{96, 3 << 10, 1 << 20}, 0, 95, 8);
  EXPECT_EQ(slice.offset_bytes, int64_t{285} << 30);
  EXPECT_EQ(slice.piece_bytes, int64_t{3} << 30);
}

TEST(SliceRow, TakesPackedRowsThatEndOnAByte) {
  EXPECT_EQ(SliceRow(std::vector<int64_t>{4, 6}, 0, 1, 4)->offset_bytes, 3);
  EXPECT_EQ(SliceRow(std::vector<int64_t>{4, 7}, 0, 1, 4).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(SliceRow, RefusesWhatIsNoRow) {
  const std::vector<int64_t> dims = {0, 8};
  EXPECT_EQ(SliceRow(dims, 0, 0, 8).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(SliceRow(dims, 2, 0, 8).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(SliceRow(dims, -1, 0, 8).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(SliceRow(std::vector<int64_t>{int64_t{1} << 40, int64_t{1} << 40},
                     0, 0, 8)
                .status()
                .code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace turbobus::offload

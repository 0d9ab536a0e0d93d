#include "moe/cuda/known_totals.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace turbobus::moe::cuda {
namespace {

const std::vector<int> kDevices = {0, 1};

Shape ShapeOf(int num_tokens) {
  Shape shape;
  shape.num_ranks = 2;
  shape.num_tokens = num_tokens;
  shape.row_bytes = 64;
  return shape;
}

KnownTotals::Record RecordOf(int num_tokens, int32_t total) {
  return {.shape = ShapeOf(num_tokens),
          .devices = kDevices,
          .totals = std::make_shared<const int32_t>(total)};
}

const void* Address(uintptr_t at) { return reinterpret_cast<const void*>(at); }

TEST(KnownTotals, FindsWhatWasPutForTheBufferOfTheRun) {
  KnownTotals known(4);
  known.Put({0, 7, Address(64)}, RecordOf(10, 3));
  Shape shape = ShapeOf(10);
  shape.row_bytes = 4096;  // Rows may change on the way.
  const auto found = known.Find({0, 7, Address(64)}, shape, kDevices);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(*found->totals, 3);
}

TEST(KnownTotals, FindsNothingOfAnotherRunDeviceBufferShapeOrMesh) {
  KnownTotals known(4);
  known.Put({0, 7, Address(64)}, RecordOf(10, 3));
  const Shape shape = ShapeOf(10);
  EXPECT_FALSE(known.Find({0, 8, Address(64)}, shape, kDevices));
  EXPECT_FALSE(known.Find({1, 7, Address(64)}, shape, kDevices));
  EXPECT_FALSE(known.Find({0, 7, Address(128)}, shape, kDevices));
  EXPECT_FALSE(known.Find({0, 7, Address(64)}, ShapeOf(11), kDevices));
  EXPECT_FALSE(known.Find({0, 7, Address(64)}, shape, {1, 0}));
}

TEST(KnownTotals, KeepsTheLatestOfABuffer) {
  KnownTotals known(4);
  known.Put({0, 7, Address(64)}, RecordOf(10, 3));
  known.Put({0, 7, Address(64)}, RecordOf(10, 5));
  const auto found = known.Find({0, 7, Address(64)}, ShapeOf(10), kDevices);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(*found->totals, 5);
}

TEST(KnownTotals, ForgetsABufferOnly) {
  KnownTotals known(2);
  known.Put({0, 7, Address(64)}, RecordOf(10, 3));
  known.Put({0, 7, Address(128)}, RecordOf(10, 4));
  known.Forget({0, 7, Address(64)});
  known.Forget({0, 8, Address(128)});
  EXPECT_FALSE(known.Find({0, 7, Address(64)}, ShapeOf(10), kDevices));
  EXPECT_TRUE(known.Find({0, 7, Address(128)}, ShapeOf(10), kDevices));
  known.Put({0, 7, Address(64)}, RecordOf(10, 5));
  const auto found = known.Find({0, 7, Address(64)}, ShapeOf(10), kDevices);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(*found->totals, 5);
}

TEST(KnownTotals, ForgetsTheOldestOfADeviceAndLetsGoOfIt) {
  KnownTotals known(4);
  std::vector<std::weak_ptr<const int32_t>> kept;
  const auto put = [&](int device, uintptr_t at) {
    KnownTotals::Record record = RecordOf(10, 1);
    kept.push_back(record.totals);
    known.Put({device, 7, Address(at)}, std::move(record));
  };
  put(1, 1);
  for (uintptr_t at = 1; at <= 4; ++at) put(0, at);
  put(0, 1);  // Anew: the one of buffer 2 is the oldest now.
  put(0, 5);
  put(0, 6);
  const auto has = [&](int device, uintptr_t at) {
    return known.Find({device, 7, Address(at)}, ShapeOf(10), kDevices)
        .has_value();
  };
  EXPECT_FALSE(has(0, 2));
  EXPECT_FALSE(has(0, 3));
  for (const uintptr_t at : {1, 4, 5, 6}) EXPECT_TRUE(has(0, at)) << at;
  EXPECT_TRUE(has(1, 1));
  int num_alive = 0;
  for (const auto& one : kept) num_alive += !one.expired();
  EXPECT_EQ(num_alive, 5);
}

}  // namespace
}  // namespace turbobus::moe::cuda

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "engine/stream_engine.h"
#include "engine/stream_testing.h"

// Rows whose place the device says: fetched, stored, and guessed ahead.

namespace turbobus::engine {
namespace {

TEST(StreamRowsTest, RowsAreFetchedAndStoredWhereTheDeviceSays) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Machine machine(1 + static_cast<int>(seed % 3), seed);
    const int64_t row_bytes = (seed % 2 == 0 ? 300 : 30) * kKiB + 3;
    Buffer stack = Random(5 * row_bytes, seed);
    const Buffer original = stack;
    Buffer row(static_cast<size_t>(row_bytes));
    auto index = static_cast<int32_t>(seed % 8) - 1;  // clamped
    const int32_t clamped = std::clamp(index, 0, 4);
    ASSERT_EQ(machine.engine->CopyRow(machine.Row(0, stack, 5, index, row)),
              OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_TRUE(std::equal(row.begin(), row.end(),
                           original.begin() + clamped * row_bytes));
    const Buffer stored = Random(row_bytes, seed + 9);
    row = stored;
    ASSERT_EQ(
        machine.engine->CopyRow(machine.Row(0, stack, 5, index, row, true)),
        OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
    Buffer expected = original;
    std::ranges::copy(stored, expected.begin() + clamped * row_bytes);
    ASSERT_EQ(stack, expected);
  }
}

TEST(StreamRowsTest, StartedFetchesAreRightWhetherGuessedOrNot) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    Machine machine(2, seed);
    const int64_t row_bytes = 300 * kKiB;
    constexpr int32_t kRows = 6;
    Buffer stack = Random(kRows * row_bytes, seed);
    std::mt19937 random(static_cast<uint32_t>(seed));
    int32_t index = 0;  // on the device: set in stream order
    for (int run = 1; run <= 4; ++run) {
      for (int32_t i = 0; i < kRows; ++i) {
        const int32_t wanted = seed % 2 == 0 ? i : random() % kRows;
        Buffer row(static_cast<size_t>(row_bytes));
        Buffer seen;
        RowRequest request = machine.Row(0, stack, kRows, index, row);
        request.run = run;
        machine.streams->Enqueue(machine.xla[0],
                                 [&index, wanted] { index = wanted; });
        ASSERT_EQ(machine.engine->StartRow(request), OkStatus());
        ASSERT_EQ(machine.engine->Done({.call = "done",
                                        .gpu = 0,
                                        .stream = machine.xla[0],
                                        .run = run,
                                        .buffer = row.data()}),
                  OkStatus());
        machine.streams->Enqueue(machine.xla[0], [&] { seen = row; });
        ASSERT_TRUE(machine.streams->Drain());
        ASSERT_TRUE(std::equal(seen.begin(), seen.end(),
                               stack.begin() + wanted * row_bytes))
            << "seed " << seed << " row " << i;
      }
    }
    const StreamStats stats = machine.engine->stats();
    if (seed % 2 == 0) {
      EXPECT_EQ(stats.num_rows_guessed, 4 * kRows);
      EXPECT_EQ(stats.num_guesses_wrong, 0);
    } else {
      EXPECT_GT(stats.num_guesses_wrong, 0);
    }
  }
}

TEST(StreamRowsTest, StacksOfLongAgoAreForgotten) {
  Machine machine(2);
  std::vector<Buffer> stacks(300, Buffer(2 * 200 * kKiB));
  Buffer row(200 * kKiB);
  int32_t index = 1;
  for (Buffer& stack : stacks) {
    ASSERT_EQ(machine.engine->StartRow(machine.Row(0, stack, 2, index, row)),
              OkStatus());
    ASSERT_EQ(machine.engine->Done({.call = "done",
                                    .gpu = 0,
                                    .stream = machine.xla[0],
                                    .run = 1,
                                    .buffer = row.data()}),
              OkStatus());
    ASSERT_TRUE(machine.streams->Drain());
  }
  const StreamStats stats = machine.engine->stats();
  EXPECT_EQ(stats.num_guessed_stacks, 256);
  // Those of forgotten stacks count as well: the first guess is row 0.
  EXPECT_EQ(stats.num_guesses_wrong, 300);
}

TEST(StreamRowsTest, AStartedStoreIsCompleteAfterDone) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine(2, seed);
    Buffer stack(4 * 300 * kKiB);
    Buffer row = Random(300 * kKiB, seed);
    const Buffer stored = row;
    int32_t index = 2;
    ASSERT_EQ(
        machine.engine->StartRow(machine.Row(0, stack, 4, index, row, true)),
        OkStatus());
    ASSERT_EQ(machine.engine->Done({.call = "done",
                                    .gpu = 0,
                                    .stream = machine.xla[0],
                                    .run = 1,
                                    .buffer = stack.data()}),
              OkStatus());
    Buffer seen;
    machine.streams->Enqueue(machine.xla[0], [&] { seen = stack; });
    ASSERT_TRUE(machine.streams->Drain());
    ASSERT_TRUE(std::equal(stored.begin(), stored.end(),
                           seen.begin() + 2 * 300 * kKiB));
  }
}

TEST(StreamRowsTest, SeveralRowsOfOneStackAreDoneOneByOne) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Machine machine(2, seed);
    Buffer stack(4 * 300 * kKiB);
    std::vector<Buffer> rows = {Random(300 * kKiB, 1), Random(300 * kKiB, 2)};
    int32_t indices[] = {3, 1};
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(machine.engine->StartRow(
                    machine.Row(0, stack, 4, indices[i], rows[i], true)),
                OkStatus());
    }
    const DoneRequest done = {.call = "done",
                              .gpu = 0,
                              .stream = machine.xla[0],
                              .run = 1,
                              .buffer = stack.data()};
    ASSERT_EQ(machine.engine->Done(done), OkStatus());
    ASSERT_EQ(machine.engine->Done(done), OkStatus());
    EXPECT_FALSE(machine.engine->Done(done).ok());
    ASSERT_TRUE(machine.streams->Drain());
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(std::equal(rows[i].begin(), rows[i].end(),
                             stack.begin() + indices[i] * 300 * kKiB));
    }
  }
}

TEST(StreamRowsTest, PageableStacksAreRefusedWithAWayOut) {
  Machine machine(2);
  Buffer stack(4 * 300 * kKiB);
  Buffer row(300 * kKiB);
  int32_t index = 2;
  const RowRequest request = machine.Row(0, stack, 4, index, row);
  machine.streams->pageable.insert(stack.data());
  const Status status = machine.engine->CopyRow(request);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("pinned_host"), std::string::npos);
}

}  // namespace
}  // namespace turbobus::engine

#include "moe/ragged_exchange.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "moe/ragged_plan.h"

namespace turbobus::moe {
namespace {

constexpr int kRanks = 3;
constexpr int kSlices = 3;
constexpr int64_t kBatches = 2;
constexpr int64_t kOperandRows = 700;
constexpr int64_t kOutputRows = 900;
constexpr int64_t kWidth = 300;  // 1200 bytes: a row range is several pieces

class TestMember : public RaggedMember {
 public:
  void Done(const Status&) override {}
};

/// Slice i of rank r sends 200 + r rows to row 210 r of rank i; rank 1 sends
/// nothing to rank 0. The second batch begins one operand row later.
std::vector<int32_t> Tables() {
  std::vector<int32_t> fields;
  const auto size = [](int from, int to) {
    return from == 1 && to == 0 ? 0 : 200 + from;
  };
  for (int batch = 0; batch < kBatches; ++batch) {
    for (int r = 0; r < kRanks; ++r) {
      for (int i = 0; i < kSlices; ++i) fields.push_back(150 * i + batch);
      for (int i = 0; i < kSlices; ++i) fields.push_back(size(r, i));
      for (int i = 0; i < kSlices; ++i) fields.push_back(210 * r);
      for (int i = 0; i < kSlices; ++i) fields.push_back(size(i, r));
    }
  }
  return fields;
}

struct Rank {
  std::vector<float> source;
  std::vector<float> result;
};

std::vector<std::unique_ptr<Member>> MakeMembers(
    const RaggedShape& shape, const std::vector<int32_t>& tables,
    std::vector<Rank>& ranks) {
  std::vector<std::unique_ptr<Member>> members;
  for (Rank& rank : ranks) {
    auto member = std::make_unique<TestMember>();
    member->shape = shape;
    member->tables = tables;
    member->source = reinterpret_cast<const std::byte*>(rank.source.data());
    member->result = reinterpret_cast<std::byte*>(rank.result.data());
    members.push_back(std::move(member));
  }
  return members;
}

RaggedShape Shape(RaggedDirection direction) {
  return {.direction = direction,
          .num_ranks = kRanks,
          .num_slices = kSlices,
          .num_batches = kBatches,
          .num_tables = kBatches,
          .operand_rows = kOperandRows,
          .output_rows = kOutputRows,
          .row_bytes = kWidth * 4,
          .element = RowElement::kFloat32};
}

std::vector<Rank> MakeRanks(int64_t source_rows, int64_t result_rows) {
  std::vector<Rank> ranks(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    ranks[r].source.resize(kBatches * source_rows * kWidth);
    for (size_t i = 0; i < ranks[r].source.size(); ++i) {
      ranks[r].source[i] = static_cast<float>((i * 7 + r * 13) % 31);
    }
    ranks[r].result.assign(kBatches * result_rows * kWidth, -1);
  }
  return ranks;
}

void RunOnThreads(Work& work) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&work, t] {
      for (int64_t piece = t; piece < work.num_pieces(); piece += 4)
        work.Run(piece);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RaggedExchangeTest, ForwardMovesEveryRunOfEveryBatch) {
  const std::vector<int32_t> tables = Tables();
  std::vector<Rank> ranks = MakeRanks(kOperandRows, kOutputRows);
  const auto members =
      MakeMembers(Shape(RaggedDirection::kForward), tables, ranks);
  auto work = MakeRaggedWork(members);
  ASSERT_TRUE(work.ok()) << work.status();
  EXPECT_GT((*work)->num_pieces(), kRanks * kBatches);
  RunOnThreads(**work);

  for (int64_t batch = 0; batch < kBatches; ++batch) {
    const size_t size = tables.size() / kBatches;
    const RaggedTable table(
        std::span<const int32_t>(tables).subspan(batch * size, size), kRanks,
        kSlices);
    for (int r = 0; r < kRanks; ++r) {
      std::vector<float> expected(kOutputRows * kWidth, -1);
      for (const RaggedRun& run : table.RunsInto(r)) {
        const float* from = ranks[run.source].source.data() +
                            (batch * kOperandRows + run.operand_row) * kWidth;
        std::copy(from, from + run.num_rows * kWidth,
                  expected.begin() + run.output_row * kWidth);
      }
      const auto begin = ranks[r].result.begin() + batch * kOutputRows * kWidth;
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), begin));
    }
  }
}

TEST(RaggedExchangeTest, TransposeAddsUpWhatOverlappingSlicesSent) {
  const std::vector<int32_t> tables = Tables();
  std::vector<Rank> ranks = MakeRanks(kOutputRows, kOperandRows);
  const auto members =
      MakeMembers(Shape(RaggedDirection::kTranspose), tables, ranks);
  auto work = MakeRaggedWork(members);
  ASSERT_TRUE(work.ok()) << work.status();
  RunOnThreads(**work);

  for (int64_t batch = 0; batch < kBatches; ++batch) {
    const size_t size = tables.size() / kBatches;
    const RaggedTable table(
        std::span<const int32_t>(tables).subspan(batch * size, size), kRanks,
        kSlices);
    for (int r = 0; r < kRanks; ++r) {
      std::vector<float> expected(kOperandRows * kWidth, 0);
      for (const RaggedRun& run : table.RunsFrom(r)) {
        const float* from = ranks[run.destination].source.data() +
                            (batch * kOutputRows + run.output_row) * kWidth;
        for (int64_t i = 0; i < run.num_rows * kWidth; ++i) {
          expected[run.operand_row * kWidth + i] += from[i];
        }
      }
      const auto begin =
          ranks[r].result.begin() + batch * kOperandRows * kWidth;
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), begin));
    }
  }
}

TEST(RaggedExchangeTest, ABadTableNamesItsBatch) {
  std::vector<int32_t> tables = Tables();
  tables[tables.size() / 2] = -5;  // the first input offset of the second batch
  std::vector<Rank> ranks = MakeRanks(kOperandRows, kOutputRows);
  const auto members =
      MakeMembers(Shape(RaggedDirection::kForward), tables, ranks);
  const auto work = MakeRaggedWork(members);
  EXPECT_EQ(work.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(work.status().message().find("batch 1"), std::string::npos)
      << work.status();
}

TEST(RaggedExchangeTest, RanksMustBringOneShape) {
  const std::vector<int32_t> tables = Tables();
  std::vector<Rank> ranks = MakeRanks(kOperandRows, kOutputRows);
  const auto members =
      MakeMembers(Shape(RaggedDirection::kForward), tables, ranks);
  static_cast<RaggedMember&>(*members[2]).shape.operand_rows -= 1;
  const auto work = MakeRaggedWork(members);
  EXPECT_EQ(work.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(work.status().message().find("rank 2"), std::string::npos)
      << work.status();
}

TEST(RaggedExchangeTest, RowsWithoutBytesNeedNoWork) {
  const std::vector<int32_t> tables = Tables();
  std::vector<Rank> ranks = MakeRanks(0, 0);
  RaggedShape shape = Shape(RaggedDirection::kForward);
  shape.row_bytes = 0;
  auto work = MakeRaggedWork(MakeMembers(shape, tables, ranks));
  ASSERT_TRUE(work.ok()) << work.status();
  RunOnThreads(**work);
}

}  // namespace
}  // namespace turbobus::moe

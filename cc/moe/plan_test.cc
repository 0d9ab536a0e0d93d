#include "moe/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace turbobus::moe {
namespace {

/// All ranks' ids, counted.
struct Counted {
  ExchangeShape shape;
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<int32_t>> slots;
  std::vector<std::vector<int32_t>> counts;

  explicit Counted(ExchangeShape shape, std::vector<std::vector<int32_t>> ids)
      : shape(shape), ids(std::move(ids)) {
    for (const auto& of_rank : this->ids) {
      slots.emplace_back(of_rank.size());
      counts.emplace_back(shape.num_experts);
      CountChoices(shape, of_rank, slots.back(), counts.back());
    }
  }

  RowPlan Plan() const {
    std::vector<const int32_t*> pointers;
    for (const auto& c : counts) pointers.push_back(c.data());
    return RowPlan(shape, pointers);
  }
};

TEST(CountChoicesTest, PlacesAreCountedByExpertInTokenOrder) {
  const ExchangeShape shape = {.num_experts = 4, .num_tokens = 3, .top_k = 2};
  const Counted c(shape, {{2, 0, 2, 1, 0, 2}});
  EXPECT_EQ(c.slots[0], (std::vector<int32_t>{0, 0, 1, 0, 1, 2}));
  EXPECT_EQ(c.counts[0], (std::vector<int32_t>{2, 1, 3, 0}));
}

TEST(CountChoicesTest, IdsThatAreNoExpertsHaveNoPlace) {
  const ExchangeShape shape = {.num_experts = 2, .num_tokens = 2, .top_k = 3};
  const Counted c(shape, {{-1, 1, 2, INT32_MAX, INT32_MIN, 0}});
  EXPECT_EQ(c.slots[0], (std::vector<int32_t>{-1, 0, -1, -1, -1, 0}));
  EXPECT_EQ(c.counts[0], (std::vector<int32_t>{1, 1}));
}

TEST(CountChoicesTest, ARepeatedExpertSharesThePlace) {
  const ExchangeShape shape = {.num_experts = 2, .num_tokens = 2, .top_k = 3};
  const Counted c(shape, {{1, 0, 1, 1, 1, 1}});
  EXPECT_EQ(c.slots[0], (std::vector<int32_t>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(c.counts[0], (std::vector<int32_t>{1, 2}));
}

TEST(RowPlanTest, RowsAreOrderedByLocalExpertThenSource) {
  const ExchangeShape shape = {.num_ranks = 2,
                               .num_experts = 4,
                               .num_tokens = 2,
                               .top_k = 1,
                               .recv_capacity = 4};
  const Counted c(shape, {{1, 1}, {0, 1}});
  const RowPlan plan = c.Plan();
  EXPECT_EQ(plan.row(1, 0, 0), 0);
  EXPECT_EQ(plan.row(0, 1, 0), 1);
  EXPECT_EQ(plan.row(0, 1, 1), 2);
  EXPECT_EQ(plan.row(1, 1, 0), 3);
  EXPECT_EQ(plan.kept(0), 1);
  EXPECT_EQ(plan.kept(1), 3);
  EXPECT_EQ(plan.kept(2), 0);
}

TEST(RowPlanTest, OverCapacityTheFullestExpertsAreCutToOneLevel) {
  ExchangeShape shape = {.num_ranks = 1,
                         .num_experts = 4,
                         .num_tokens = 20,
                         .top_k = 1,
                         .recv_capacity = 13};
  // 10, 1, 6 and 3 rows wanted; 13 fit: levels 5, 1, 4 and 3.
  std::vector<int32_t> ids;
  for (const auto& [expert, n] :
       std::vector<std::pair<int, int>>{{0, 10}, {1, 1}, {2, 6}, {3, 3}}) {
    ids.insert(ids.end(), n, expert);
  }
  const Counted c(shape, {ids});
  const RowPlan plan = c.Plan();
  const std::vector<int64_t> kept = {5, 1, 4, 3};
  for (int e = 0; e < 4; ++e) EXPECT_EQ(plan.kept(e), kept[e]) << e;
  EXPECT_EQ(plan.wanted(0), 10);
  EXPECT_EQ(plan.row(0, 0, 4), 4);
  EXPECT_EQ(plan.row(0, 0, 5), kNoRow);
  EXPECT_EQ(plan.row(0, 1, 0), 5);
  EXPECT_EQ(plan.row(0, 3, 2), 12);
}

TEST(RowPlanTest, PaddedExpertsKeepTheirOwnCapacity) {
  const ExchangeShape shape = {.num_ranks = 2,
                               .num_experts = 4,
                               .num_tokens = 3,
                               .top_k = 1,
                               .recv_capacity = 8,
                               .expert_capacity = 4};
  const Counted c(shape, {{0, 0, 0}, {0, 0, 1}});
  const RowPlan plan = c.Plan();
  EXPECT_EQ(plan.kept(0), 4);
  EXPECT_EQ(plan.row(1, 0, 0), 3);
  EXPECT_EQ(plan.row(1, 0, 1), kNoRow);
  EXPECT_EQ(plan.row(1, 1, 0), 4);
}

TEST(PaddingRowsTest, IsWhatNoExpertHas) {
  ExchangeShape shape = {.num_experts = 3, .recv_capacity = 10};
  const auto text = [&](std::vector<int32_t> sizes) {
    std::string ranges;
    for (const RowRange& r : PaddingRows(shape, sizes)) {
      ranges += std::to_string(r.begin) + "-" + std::to_string(r.end) + " ";
    }
    return ranges;
  };
  EXPECT_EQ(text({2, 0, 3}), "5-10 ");
  EXPECT_EQ(text({4, 4, 2}), "");
  EXPECT_EQ(text({0, 0, 0}), "0-10 ");
  shape.recv_capacity = 12;
  shape.expert_capacity = 4;
  EXPECT_EQ(text({2, 4, 0}), "2-4 8-12 ");
  // Sizes that cannot be, as a caller may have made them, stay inside.
  EXPECT_EQ(text({-7, 99, INT32_MAX}), "0-4 ");
}

// Random ids and capacities: every kept row exists once, lies in its expert's
// part, parts fill the result from its start, and drops are the stated ones.
TEST(RowPlanTest, RandomPlansArePermutationsOfWhatIsKept) {
  std::mt19937 random(20261130);
  const auto below = [&](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  for (int round = 0; round < 300; ++round) {
    ExchangeShape shape;
    shape.num_ranks = 1 + below(5);
    shape.num_experts = shape.num_ranks * (1 + below(4));
    shape.num_tokens = below(12);
    shape.top_k = 1 + below(4);
    if (below(2) == 0) {
      shape.expert_capacity = 1 + below(20);
      shape.recv_capacity = shape.num_local_experts() * shape.expert_capacity;
    } else {
      shape.recv_capacity = below(60);
    }
    std::vector<std::vector<int32_t>> ids(shape.num_ranks);
    for (auto& of_rank : ids) {
      for (int i = 0; i < shape.num_tokens * shape.top_k; ++i) {
        of_rank.push_back(below(shape.num_experts + 2) - 1);
      }
    }
    const Counted c(shape, ids);
    const RowPlan plan = c.Plan();
    std::vector<std::set<int32_t>> rows(shape.num_ranks);
    for (int r = 0; r < shape.num_ranks; ++r) {
      for (int64_t t = 0; t < shape.num_tokens; ++t) {
        const int32_t* choices = &c.ids[r][t * shape.top_k];
        for (int j = 0; j < shape.top_k; ++j) {
          const int32_t place = c.slots[r][t * shape.top_k + j];
          if (!shape.has_expert(choices[j])) {
            ASSERT_EQ(place, kNoRow);
            continue;
          }
          const int32_t row = plan.row(r, choices[j], place);
          if (row == kNoRow || IsRepeated(choices, j)) continue;
          const int64_t first = plan.first_row(choices[j]);
          ASSERT_GE(row, first);
          ASSERT_LT(row, first + plan.kept(choices[j]));
          ASSERT_TRUE(rows[shape.rank_of(choices[j])].insert(row).second);
        }
      }
    }
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      const int first = rank * shape.num_local_experts();
      int64_t kept = 0;
      int64_t wanted = 0;
      int64_t fullest = 0;
      for (int e = first; e < first + shape.num_local_experts(); ++e) {
        kept += plan.kept(e);
        wanted += plan.wanted(e);
        fullest = std::max(fullest, plan.kept(e));
      }
      ASSERT_EQ(static_cast<int64_t>(rows[rank].size()), kept);
      if (shape.is_padded()) {
        ASSERT_LE(fullest, shape.expert_capacity);
        continue;
      }
      ASSERT_EQ(kept, std::min(wanted, shape.recv_capacity));
      for (int e = first; e < first + shape.num_local_experts(); ++e) {
        // Only the fullest lose rows.
        if (plan.kept(e) < plan.wanted(e)) {
          ASSERT_GE(plan.kept(e), fullest - 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace turbobus::moe

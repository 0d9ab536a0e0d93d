#include "engine/index_predictor.h"

#include <gtest/gtest.h>

#include <vector>

namespace turbobus::engine {
namespace {

/// Misses of one run that fetches `rows`, the device `behind` calls behind.
int Misses(IndexPredictor& predictor, int64_t run,
           const std::vector<int32_t>& rows, size_t behind = 0) {
  int misses = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    misses += predictor.Predict(run, 100) != rows[i];
    if (i >= behind) predictor.Observe(rows[i - behind]);
  }
  for (size_t i = rows.size() - std::min(behind, rows.size()); i < rows.size();
       ++i) {
    predictor.Observe(rows[i]);
  }
  return misses;
}

const std::vector<int32_t> kForward = {0, 1, 2, 3, 4, 5};
const std::vector<int32_t> kTraining = {0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0};

TEST(IndexPredictorTest, ForwardLoopsAreRightFromTheStart) {
  IndexPredictor predictor;
  EXPECT_EQ(Misses(predictor, 1, kForward), 0);
  EXPECT_EQ(Misses(predictor, 2, kForward, 6), 0);
}

TEST(IndexPredictorTest, ATrainingStepIsLearntFromItsFirstRun) {
  IndexPredictor predictor;
  EXPECT_GT(Misses(predictor, 1, kTraining), 0);
  EXPECT_EQ(Misses(predictor, 2, kTraining), 0);
  EXPECT_EQ(Misses(predictor, 3, kTraining, 12), 0);
}

TEST(IndexPredictorTest, TheHostMayBeARunAhead) {
  IndexPredictor predictor;
  EXPECT_GT(Misses(predictor, 1, kTraining, 12), 0);
  EXPECT_EQ(Misses(predictor, 2, kTraining, 12), 0);
}

TEST(IndexPredictorTest, GuessesStayInRange) {
  IndexPredictor predictor;
  for (int i = 0; i < 5; ++i) {
    const int32_t guess = predictor.Predict(1, 3);
    EXPECT_GE(guess, 0);
    EXPECT_LT(guess, 3);
  }
}

TEST(IndexPredictorTest, ConfidenceGoesWhereRowsAreRandomAndComesBack) {
  IndexPredictor predictor;
  uint32_t state = 1;
  for (int i = 0; i < 50; ++i) {
    (void)predictor.Predict(1, 1000);
    state = state * 1664525 + 1013904223;
    predictor.Observe(static_cast<int32_t>(state >> 8) % 1000);
  }
  EXPECT_FALSE(predictor.is_confident());
  for (int run = 2; run < 8; ++run) (void)Misses(predictor, run, kForward);
  EXPECT_TRUE(predictor.is_confident());
}

}  // namespace
}  // namespace turbobus::engine

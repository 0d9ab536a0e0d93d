#include "engine/index_predictor.h"

#include <algorithm>

namespace turbobus::engine {

void IndexPredictor::Past::Enter(int64_t new_run) {
  if (run == new_run) return;
  run = new_run;
  before = last = kNone;
}

void IndexPredictor::Past::Append(int32_t index) {
  before = last;
  last = index;
}

int32_t IndexPredictor::Next(const Past& past, int32_t num_rows) const {
  int32_t guess = 0;
  if (const auto it = follower_.find({past.before, past.last});
      it != follower_.end()) {
    guess = it->second;
  } else if (past.last != kNone) {
    const int32_t step = past.before == kNone ? 1 : past.last - past.before;
    guess = past.last + step;
  }
  return std::clamp(guess, 0, std::max(num_rows - 1, 0));
}

int32_t IndexPredictor::Predict(int64_t run, int32_t num_rows) {
  assumed_.Enter(run);
  const int32_t guess = Next(assumed_, num_rows);
  assumed_.Append(guess);
  open_.push_back({run, num_rows, guess});
  return guess;
}

void IndexPredictor::Observe(int32_t actual) {
  if (open_.empty()) return;
  const Guess guess = open_.front();
  open_.pop_front();
  known_.Enter(guess.run);
  if (follower_.size() >= kMostFollowers) follower_.clear();
  follower_[{known_.before, known_.last}] = actual;
  known_.Append(actual);
  if (guess.index == actual) {
    ++num_right_;
    confidence_ = std::min(confidence_ + 1, kMostConfident);
    return;
  }
  ++num_wrong_;
  confidence_ = std::max(confidence_ - kCostOfAMiss, 0);
  // What was guessed after the miss was built on it: guess again, so that what
  // comes next is built on the truth.
  assumed_ = known_;
  for (const Guess& later : open_) {
    assumed_.Enter(later.run);
    assumed_.Append(Next(assumed_, later.num_rows));
  }
}

void IndexPredictor::Forget() {
  if (!open_.empty()) open_.pop_front();
}

}  // namespace turbobus::engine

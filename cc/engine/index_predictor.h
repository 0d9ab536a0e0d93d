#ifndef TURBOBUS_ENGINE_INDEX_PREDICTOR_H_
#define TURBOBUS_ENGINE_INDEX_PREDICTOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>

namespace turbobus::engine {

/// Guesses which row a layer loop fetches next, from the rows that it fetched
/// before.
///
/// The row number is a scalar on the device, so a handler that must not wait
/// cannot know it; copy engines need it. The engine copies the guessed row at
/// once and lets the device compare later: a wrong guess costs time, never
/// bytes. A guess is what followed the last two rows last time, else the next
/// row in steps of the same size. Pure; not thread-safe.
class IndexPredictor {
 public:
  /// The guess for the next fetch, in `[0, num_rows)`. A new `run` starts
  /// without a past: what a program does first does not depend on what another
  /// one did last.
  int32_t Predict(int64_t run, int32_t num_rows);

  /// The row that the oldest unobserved `Predict` should have said.
  void Observe(int32_t actual);

  /// The oldest unobserved `Predict` will never be observed.
  void Forget();

  /// Whether guesses have been right of late.
  bool is_confident() const { return confidence_ >= kEnough; }

  int64_t num_right() const { return num_right_; }
  int64_t num_wrong() const { return num_wrong_; }

 private:
  static constexpr int kEnough = 4;
  static constexpr int kMostConfident = 12;
  static constexpr int kCostOfAMiss = 4;
  static constexpr int32_t kNone = -1;
  /// Rows that come at random would fill memory.
  static constexpr size_t kMostFollowers = 8192;

  struct Past {
    int64_t run = 0;
    int32_t before = kNone;
    int32_t last = kNone;

    void Enter(int64_t new_run);
    void Append(int32_t index);
  };
  struct Guess {
    int64_t run;
    int32_t num_rows;
    int32_t index;
  };

  int32_t Next(const Past& past, int32_t num_rows) const;

  std::map<std::pair<int32_t, int32_t>, int32_t> follower_;
  std::deque<Guess> open_;
  /// After everything observed; after everything guessed.
  Past known_;
  Past assumed_;
  int confidence_ = 2 * kEnough;
  int64_t num_right_ = 0;
  int64_t num_wrong_ = 0;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_INDEX_PREDICTOR_H_

#include "engine/completion.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace turbobus::engine {
namespace {

std::unique_ptr<CompletionThreads> Make() {
  auto threads = CompletionThreads::Create();
  EXPECT_TRUE(threads.ok());
  return std::move(threads).value();
}

TEST(CompletionThreadsTest, CallbacksThatWaitForEachOtherAllGetAThread) {
  constexpr int kNumCallbacks = 40;
  auto threads = Make();
  std::latch all(kNumCallbacks);
  for (int i = 0; i < kNumCallbacks; ++i) {
    threads->Run([&] { all.arrive_and_wait(); });
  }
  threads->Drain();
  EXPECT_TRUE(all.try_wait());
}

TEST(CompletionThreadsTest, CallbacksThatDoNotBlockShareFewThreads) {
  auto threads = Make();
  std::mutex mutex;
  std::set<std::thread::id> ids;
  for (int i = 0; i < 2000; ++i) {
    threads->Run([&] {
      const std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    });
  }
  threads->Drain();
  EXPECT_LT(ids.size(), 200U);
}

TEST(CompletionThreadsTest, DrainWaitsForTheReturnOfEveryCallback) {
  auto threads = Make();
  std::atomic<int> num_returned = 0;
  for (int i = 0; i < 10; ++i) {
    threads->Run([&] {
      std::this_thread::yield();
      ++num_returned;
    });
  }
  threads->Drain();
  EXPECT_EQ(num_returned, 10);
}

TEST(CompletionThreadsTest, ACallbackMayDestroyThem) {
  auto threads = Make();
  std::latch done(2);
  CompletionThreads* const raw = threads.get();
  raw->Run([&done, owner = std::shared_ptr<CompletionThreads>(
                       std::move(threads))]() mutable {
    owner->Run([&done] { done.count_down(); });
    owner.reset();
    done.count_down();
  });
  done.wait();
}

}  // namespace
}  // namespace turbobus::engine

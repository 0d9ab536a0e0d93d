#include "moe/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <thread>

namespace turbobus::moe {
namespace {

using std::chrono::milliseconds;

TEST(ThreadsTest, TasksThatWaitForEachOtherAllRun) {
  constexpr int kNum = 40;
  std::latch all_here(kNum);
  std::atomic<int> num_run = 0;
  {
    Threads threads;
    for (int i = 0; i < kNum; ++i) {
      threads.Start([&] {
        all_here.arrive_and_wait();
        ++num_run;
      });
    }
  }
  EXPECT_EQ(num_run, kNum);
}

TEST(ThreadsTest, AnIdleThreadTakesTheNextTask) {
  Threads threads;
  for (int i = 0; i < 100; ++i) {
    std::latch done(1);
    threads.Start([&] { done.count_down(); });
    done.wait();
  }
  // A finished task's thread may not have come back yet when the next starts.
  EXPECT_LE(threads.num_threads(), 10);
  EXPECT_GE(threads.num_threads(), 1);
}

TEST(ThreadsTest, IdleThreadsEnd) {
  Threads threads(milliseconds(5));
  std::latch done(8);
  for (int i = 0; i < 8; ++i) {
    threads.Start([&] { done.arrive_and_wait(); });
  }
  done.wait();
  for (int i = 0; i < 1000 && threads.num_threads() > 0; ++i) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(threads.num_threads(), 0);
}

TEST(ThreadsTest, TasksMayStartTasks) {
  std::atomic<int> num_run = 0;
  {
    Threads threads;
    std::latch done(1);
    threads.Start([&] {
      ++num_run;
      threads.Start([&] {
        ++num_run;
        done.count_down();
      });
    });
    done.wait();
  }
  EXPECT_EQ(num_run, 2);
}

}  // namespace
}  // namespace turbobus::moe

#include "transport/peer_access.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace turbobus::transport {
namespace {

TEST(PeerAccessTest, APairIsAskedOnceAndForEachDirection) {
  std::vector<std::pair<int, int>> asked;
  PeerAccess access([&](int from, int to) {
    asked.emplace_back(from, to);
    return OkStatus();
  });
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(access.Has(0, 1));
    EXPECT_TRUE(access.Check(0, 1).ok());
    EXPECT_TRUE(access.Has(2, 2));
  }
  EXPECT_TRUE(access.Check(1, 0).ok());
  EXPECT_EQ(asked, (std::vector<std::pair<int, int>>{{0, 1}, {1, 0}}));
}

TEST(PeerAccessTest, ARefusalIsNoReachAndSaysWhyEverAfter) {
  int num_asked = 0;
  PeerAccess access([&](int from, int) {
    // It would be granted later: too late for those who went by the answer.
    return from == 0 && ++num_asked == 1 ? Internal("too many mappings")
                                         : OkStatus();
  });
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(access.Has(0, 1));
    EXPECT_EQ(access.Check(0, 1),
              Unavailable("GPU 0 cannot reach the memory of GPU 1: too many "
                          "mappings"));
  }
  EXPECT_TRUE(access.Has(1, 0));
  EXPECT_EQ(num_asked, 1);
}

TEST(PeerAccessTest, WhereItIsForbiddenNobodyIsLetIn) {
  PeerAccess access(
      [](int, int) -> Status {
        ADD_FAILURE() << "nobody is to be let in";
        return OkStatus();
      },
      "a test says so");
  EXPECT_FALSE(access.Has(0, 1));
  EXPECT_TRUE(access.Has(1, 1));
  EXPECT_EQ(access.Check(1, 0).message(),
            "GPU 1 cannot reach the memory of GPU 0: a test says so");
}

TEST(PeerAccessTest, NumbersThatAreNoGpusReachNothing) {
  PeerAccess access([](int, int) { return OkStatus(); });
  EXPECT_FALSE(access.Has(-1, 0));
  EXPECT_FALSE(access.Has(0, 64));
  EXPECT_EQ(access.Check(0, 64).code(), StatusCode::kUnavailable);
}

TEST(PeerAccessTest, ThreadsGetOneAnswer) {
  std::atomic<int> num_asked = 0;
  PeerAccess access([&](int, int) {
    return ++num_asked % 2 == 1 ? OkStatus() : Internal("asked twice");
  });
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong = 0;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 100; ++n) num_wrong += access.Has(3, 4) ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_asked, 1);
  EXPECT_EQ(num_wrong, 0);
}

}  // namespace
}  // namespace turbobus::transport

#include "moe/cuda/wiring.h"

#include <gtest/gtest.h>

#include <vector>

namespace turbobus::moe::cuda {
namespace {

using transport::PeerAccess;

/// Every pair is let in but one, in one direction.
PeerAccess AllBut(int refused_from, int refused_to) {
  return PeerAccess([=](int from, int to) {
    return from == refused_from && to == refused_to
               ? Internal("cudaDeviceEnablePeerAccess: too many peers")
               : OkStatus();
  });
}

TEST(WiringTest, WhereAllAreLetInExchangesAreDirect) {
  PeerAccess access([](int, int) { return OkStatus(); });
  const Wiring wiring = Wiring::Of({2, 0, 1}, Schedule::kPacked, &access);
  EXPECT_TRUE(wiring.is_direct);
  EXPECT_EQ(wiring.devices, (std::vector<int>{2, 0, 1}));
  EXPECT_EQ(wiring.Between(0, 2).kind, Path::Kind::kPeer);
}

TEST(WiringTest, AMappingThatFailsIsTheSlowerPathForAllRanks) {
  PeerAccess access = AllBut(1, 0);
  const Wiring wiring = Wiring::Of({0, 1, 2}, Schedule::kPacked, &access);
  EXPECT_FALSE(wiring.is_direct);
  // Neither way: a ring needs both. The others keep theirs.
  EXPECT_EQ(wiring.Between(0, 1).kind, Path::Kind::kHost);
  EXPECT_EQ(wiring.Between(1, 0).kind, Path::Kind::kHost);
  EXPECT_EQ(wiring.Between(0, 2).kind, Path::Kind::kPeer);
  // A group that the pair is not in is none the slower.
  EXPECT_TRUE(Wiring::Of({0, 2}, Schedule::kPacked, &access).is_direct);
}

TEST(WiringTest, EveryPairIsLetInBeforeTheFirstCall) {
  std::vector<std::pair<int, int>> asked;
  PeerAccess access([&](int from, int to) {
    asked.emplace_back(from, to);
    return Unavailable("a test says so");
  });
  EXPECT_FALSE(Wiring::Of({0, 1}, Schedule::kPacked, &access).is_direct);
  EXPECT_EQ(asked, (std::vector<std::pair<int, int>>{{0, 1}, {1, 0}}));
}

}  // namespace
}  // namespace turbobus::moe::cuda

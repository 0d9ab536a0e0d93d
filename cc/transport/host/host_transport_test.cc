#include "transport/host/host_transport.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace turbobus::transport::host {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

std::vector<unsigned char> Pattern(size_t size) {
  std::vector<unsigned char> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = (i * 2654435761U) >> 13;
  return bytes;
}

LaneModel Direct(int link) { return {.hops = {{.resources = {link}}}}; }
LaneModel Relay(int first, int second) {
  return {.hops = {{.resources = {first}}, {.resources = {second}}},
          .staging = 0};
}

std::unique_ptr<HostTransport> Make(LinkModel model) {
  const size_t num_lanes = model.lanes.size();
  auto transport = HostTransport::Create(std::vector<topo::Path>(num_lanes),
                                         std::move(model), 2);
  EXPECT_TRUE(transport.ok()) << transport.status();
  return std::move(transport).value();
}

std::vector<BlockDone> WaitFor(HostTransport& transport, size_t num_blocks) {
  std::vector<BlockDone> all;
  std::vector<BlockDone> some(4);
  while (all.size() < num_blocks) {
    const int num_done = transport.Wait(some, 20 * kSecond);
    if (num_done == 0) break;  // The test then fails on the count.
    all.insert(all.end(), some.begin(), some.begin() + num_done);
  }
  return all;
}

TEST(HostTransportTest, BytesArriveOnDirectAndRelayLanesAtEverySize) {
  auto transport = Make({.rates_bytes_per_s = {1e12, 1e12},
                         .lanes = {Direct(0), Relay(0, 1)},
                         .num_stagings = 1});
  const auto src = Pattern(6 << 20);
  std::vector<std::vector<unsigned char>> dst;
  uint64_t id = 0;
  const std::vector<int64_t> sizes = {0, 1, 4096, 65537, 1 << 20, 6 << 20};
  for (const int lane : {0, 1}) {
    for (const int64_t size : sizes) {
      dst.emplace_back(size);
      ASSERT_TRUE(transport
                      ->Issue({.id = id++,
                               .lane = lane,
                               .src = src.data(),
                               .dst = dst.back().data(),
                               .size_bytes = size})
                      .ok());
    }
  }
  const auto done = WaitFor(*transport, id);
  ASSERT_EQ(done.size(), id);
  for (const BlockDone& entry : done) EXPECT_TRUE(entry.status.ok());
  for (const auto& to : dst) {
    EXPECT_TRUE(std::equal(to.begin(), to.end(), src.begin()));
  }
  EXPECT_EQ(transport->num_blocks_in_flight(), 0);
}

TEST(HostTransportTest,
     EmulatedThroughputIsWithinThreePercentForSixteenMiBBlocks) {
  constexpr int64_t kBlock = 16 << 20;
  constexpr int kNumBlocks = 6;
  auto transport = Make({.rates_bytes_per_s = {400e6}, .lanes = {Direct(0)}});
  const auto src = Pattern(kBlock);
  std::vector<unsigned char> dst(kBlock);
  const int64_t start_ns = transport->NowNs();
  for (uint64_t id = 0; id < kNumBlocks; ++id) {
    ASSERT_TRUE(transport
                    ->Issue({.id = id,
                             .src = src.data(),
                             .dst = dst.data(),
                             .size_bytes = kBlock})
                    .ok());
  }
  const auto done = WaitFor(*transport, kNumBlocks);
  const double seconds =
      static_cast<double>(transport->NowNs() - start_ns) / kSecond;
  ASSERT_EQ(done.size(), kNumBlocks);
  EXPECT_EQ(dst, src);
  const double expected = kNumBlocks * kBlock / 400e6;
  // What the emulation says holds on any machine, what the clock says unless
  // the machine is overloaded; never faster than the link.
  const double stated =
      static_cast<double>(done.back().end_ns - done.front().start_ns) / kSecond;
  EXPECT_GE(seconds, expected * 0.999);
  if (transport->num_late_copies() == 0) {
    EXPECT_NEAR(stated, expected, 0.03 * expected);
  }
}

TEST(HostTransportTest, AFaultLeavesTheBlockHalfWrittenAndTheNextOneWhole) {
  auto transport = Make(UnlimitedLinks(1));
  const auto src = Pattern(1 << 20);
  std::vector<unsigned char> a(src.size());
  std::vector<unsigned char> b(src.size());
  transport->FailBlocks(-1, 0, 1);
  ASSERT_TRUE(transport
                  ->Issue({.id = 1,
                           .src = src.data(),
                           .dst = a.data(),
                           .size_bytes = 1 << 20})
                  .ok());
  ASSERT_TRUE(transport
                  ->Issue({.id = 2,
                           .src = src.data(),
                           .dst = b.data(),
                           .size_bytes = 1 << 20})
                  .ok());
  const auto done = WaitFor(*transport, 2);
  ASSERT_EQ(done.size(), 2);
  for (const BlockDone& entry : done)
    EXPECT_EQ(entry.status.ok(), entry.id == 2);
  EXPECT_NE(a, src);
  EXPECT_EQ(b, src);
}

TEST(HostTransportTest, AVanishedLaneReturnsEveryBlock) {
  auto transport = Make({.rates_bytes_per_s = {1e6}, .lanes = {Direct(0)}});
  const auto src = Pattern(1 << 20);
  std::vector<unsigned char> dst(src.size());
  for (uint64_t id = 0; id < 3; ++id) {
    ASSERT_TRUE(transport
                    ->Issue({.id = id,
                             .src = src.data(),
                             .dst = dst.data(),
                             .size_bytes = 1 << 20})
                    .ok());
  }
  std::thread other([&] { transport->VanishLane(0); });
  const auto done = WaitFor(*transport, 3);
  other.join();
  ASSERT_EQ(done.size(), 3)
      << "a second a block: only the fault ends them so soon";
  for (const BlockDone& entry : done) {
    EXPECT_EQ(entry.status.code(), StatusCode::kUnavailable);
  }
}

TEST(HostTransportTest, DroppedBlocksEndEarlyAndAreReturned) {
  auto transport = Make({.rates_bytes_per_s = {1e4}, .lanes = {Direct(0)}});
  const auto src = Pattern(1 << 20);
  std::vector<unsigned char> dst(src.size());
  ASSERT_TRUE(transport
                  ->Issue({.id = 7,
                           .src = src.data(),
                           .dst = dst.data(),
                           .size_bytes = 1 << 20})
                  .ok());
  transport->Drop(7);
  const auto done = WaitFor(*transport, 1);
  ASSERT_EQ(done.size(), 1);
  EXPECT_EQ(done[0].status.code(), StatusCode::kCancelled);
  transport->Drop(7);  // unknown by now
}

TEST(HostTransportTest, WakeEndsTheWaitUnderWayOrTheNextOne) {
  auto transport = Make(UnlimitedLinks(1));
  std::vector<BlockDone> done(1);
  transport->Wake();
  EXPECT_EQ(transport->Wait(done, -1), 0);
  std::thread other([&] { transport->Wake(); });
  EXPECT_EQ(transport->Wait(done, -1), 0);
  other.join();
  EXPECT_EQ(transport->Wait(done, 1000), 0) << "a wait with a limit comes back";
}

TEST(HostTransportTest, AModelForOtherLanesIsRefused) {
  const auto transport =
      HostTransport::Create(std::vector<topo::Path>(2), UnlimitedLinks(1));
  EXPECT_EQ(transport.status().message(),
            "links: expected a lane for each of the 2 paths, got 1");
}

}  // namespace
}  // namespace turbobus::transport::host

#include "moe/cuda/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "moe/cuda/exchange_ranks.h"
#include "moe/cuda/transfer.h"

namespace turbobus::moe::cuda {
namespace {

using testing::Bytes;
using testing::DeviceBytes;

TEST(NextBlock, CoversEachMessageOnceInBlocksThatFit) {
  for (const int64_t most : {65536, 1 << 20, 4 << 20}) {
    for (const int64_t total : {int64_t{0}, int64_t{1}, int64_t{65537},
                                int64_t{5} << 20, (int64_t{64} << 20) + 13}) {
      int64_t done = 0;
      int num_blocks = 0;
      while (const int64_t size = NextBlockBytes(done, total, most)) {
        ASSERT_GT(size, 0);
        ASSERT_LE(size, most);
        done += size;
        ++num_blocks;
      }
      EXPECT_EQ(done, total);
      EXPECT_LE(num_blocks, total / most + 12);
    }
  }
}

TEST(NextBlock, StartsAndEndsSmall) {
  constexpr int64_t kTotal = 64 << 20;
  constexpr int64_t kMost = 4 << 20;
  std::vector<int64_t> sizes;
  for (int64_t done = 0; done < kTotal; done += sizes.back()) {
    sizes.push_back(NextBlockBytes(done, kTotal, kMost));
  }
  EXPECT_LE(sizes.front(), 1 << 20);
  EXPECT_LE(sizes.back(), 1 << 20);
  EXPECT_EQ(sizes[sizes.size() / 2], kMost);
}

class RingOfPath : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    if (testing::NumGpus() == 0) GTEST_SKIP() << "there is no GPU";
  }
};

TEST_P(RingOfPath, CarriesMessagesToAllReadersInOrder) {
  const bool is_peer = GetParam().kind == Path::Kind::kPeer;
  const std::vector<int> readers(is_peer ? 1 : 3, 0);
  auto ring = Ring::Create(0, readers, GetParam(),
                           {.num_slots = 2, .slot_bytes = 65536});
  ASSERT_TRUE(ring.ok()) << ring.status();
  constexpr int64_t kSize = 1'000'003;
  Bytes message(kSize);
  for (int64_t i = 0; i < kSize; ++i) {
    message[i] = static_cast<uint8_t>(i * 7 + i / 251);
  }
  const DeviceBytes source(message);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  auto ready = EventPool::Process().Record(0, stream);
  ASSERT_TRUE(ready.ok());
  const std::vector<cudaEvent_t> reader_ready(readers.size(), ready->get());
  std::vector<DeviceBytes> targets;
  for (size_t i = 0; i < 2 * readers.size(); ++i) {
    targets.emplace_back(kSize, 0);
  }
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE((*ring)->Await(ready->get(), reader_ready).ok());
    for (int64_t done = 0; done < kSize;) {
      const int64_t size = std::min<int64_t>(65536, kSize - done);
      std::vector<void*> to;
      for (size_t i = 0; i < readers.size(); ++i) {
        to.push_back(targets[round * readers.size() + i].as() + done);
      }
      ASSERT_TRUE((*ring)->Copy(source.as() + done, to, size).ok());
      done += size;
    }
  }
  auto sent = (*ring)->RecordSent();
  ASSERT_TRUE(sent.ok());
  ASSERT_EQ(cudaEventSynchronize(sent->get()), cudaSuccess);
  for (size_t i = 0; i < readers.size(); ++i) {
    auto received = (*ring)->RecordReceived(static_cast<int>(i));
    ASSERT_TRUE(received.ok());
    ASSERT_EQ(cudaEventSynchronize(received->get()), cudaSuccess);
  }
  for (const DeviceBytes& target : targets) {
    EXPECT_TRUE(target.Read() == message);
  }
  (void)cudaStreamDestroy(stream);
}

std::string PathName(const ::testing::TestParamInfo<Path>& info) {
  switch (info.param.kind) {
    case Path::Kind::kPeer:
      return "Peer";
    case Path::Kind::kHost:
      return "Host";
    case Path::Kind::kRelay:
      return "Relay";
  }
  return "";
}

// One GPU stands in for all: a relay's slots are device memory.
INSTANTIATE_TEST_SUITE_P(, RingOfPath,
                         ::testing::Values(Path{Path::Kind::kHost, -1},
                                           Path{Path::Kind::kRelay, 0},
                                           Path{Path::Kind::kPeer, -1}),
                         PathName);

}  // namespace
}  // namespace turbobus::moe::cuda

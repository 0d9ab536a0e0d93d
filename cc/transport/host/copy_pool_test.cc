#include "transport/host/copy_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <numeric>
#include <vector>

#include "transport/host/memory_copy.h"

namespace turbobus::transport::host {
namespace {

std::vector<unsigned char> Pattern(size_t size) {
  std::vector<unsigned char> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = (i * 2654435761U) >> 13;
  return bytes;
}

TEST(MemoryCopyTest,
     StreamingCopyIsExactAtEveryAlignmentAndTouchesNothingElse) {
  const std::vector<unsigned char> src = Pattern(5000);
  for (const size_t size : {0, 1, 127, 128, 257, 500, 4096, 4801}) {
    for (size_t offset = 0; offset < 40; ++offset) {
      std::vector<unsigned char> dst(5000, 0xEE);
      StreamingCopy(dst.data() + offset, src.data() + offset % 7, size);
      for (size_t i = 0; i < dst.size(); ++i) {
        const bool is_inside = i >= offset && i < offset + size;
        ASSERT_EQ(dst[i], is_inside ? src[i - offset + offset % 7] : 0xEE)
            << "byte " << i << " of a copy of " << size << " to " << offset;
      }
    }
  }
}

TEST(MemoryCopyTest, HugePageAdviceLeavesTheBytesAlone) {
  std::vector<unsigned char> bytes = Pattern(9 << 20);
  const std::vector<unsigned char> before = bytes;
  AdviseHugePages(bytes.data(), bytes.size());
  AdviseHugePages(bytes.data(), 10);
  EXPECT_EQ(bytes, before);
}

TEST(CopyPoolTest, CopiesOfEverySizeAreExactAndSayDoneOnce) {
  auto pool = CopyPool::Create(3);
  ASSERT_TRUE(pool.ok());
  const std::vector<unsigned char> src = Pattern(9 << 20);
  for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{512 << 10},
                             int64_t{(512 << 10) + 1}, int64_t{9 << 20}}) {
    std::vector<unsigned char> dst(size + 1, 0xEE);
    std::atomic<int> num_done = 0;
    std::latch done(1);
    (*pool)->Copy(dst.data(), src.data(), size, [&] {
      ++num_done;
      done.count_down();
    });
    done.wait();
    EXPECT_TRUE(std::equal(dst.begin(), dst.end() - 1, src.begin()));
    EXPECT_EQ(dst.back(), 0xEE);
    EXPECT_EQ(num_done, 1);
  }
}

TEST(CopyPoolTest, TheDestructorFinishesWhatWasAskedFor) {
  const std::vector<unsigned char> src = Pattern(1 << 20);
  std::vector<std::vector<unsigned char>> dst(
      20, std::vector<unsigned char>(src.size()));
  std::atomic<int> num_done = 0;
  {
    auto pool = CopyPool::Create(2);
    ASSERT_TRUE(pool.ok());
    for (auto& to : dst) {
      (*pool)->Copy(to.data(), src.data(), std::ssize(src),
                    [&] { ++num_done; });
    }
  }
  EXPECT_EQ(num_done, 20);
  for (const auto& to : dst) EXPECT_EQ(to, src);
}

TEST(CopyPoolTest, DoneMayAskForTheNextCopy) {
  auto pool = CopyPool::Create(1);
  ASSERT_TRUE(pool.ok());
  const std::vector<unsigned char> src = Pattern(100);
  std::vector<unsigned char> a(100);
  std::vector<unsigned char> b(100);
  std::latch done(1);
  (*pool)->Copy(a.data(), src.data(), 100, [&] {
    (*pool)->Copy(b.data(), a.data(), 100, [&] { done.count_down(); });
  });
  done.wait();
  EXPECT_EQ(b, src);
}

}  // namespace
}  // namespace turbobus::transport::host

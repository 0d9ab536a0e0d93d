#include "moe/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <vector>

namespace turbobus::moe {
namespace {

TEST(AdviseHugePagesTest, SmallBuffersAndNoneAreLeftAlone) {
  std::vector<char> small(100, 7);
  AdviseHugePages(small.data(), 100);
  AdviseHugePages(nullptr, 0);
  EXPECT_EQ(small, std::vector<char>(100, 7));
}

TEST(AdviseHugePagesTest, ContentsStayInAndAroundTheBuffer) {
  constexpr size_t kSize = 24 << 20;
  constexpr size_t kOffset = (3 << 20) + 64;
  void* const memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const bytes = static_cast<unsigned char*>(memory);
  for (size_t i = 0; i < kSize; i += 4096) bytes[i] = i >> 12 & 0xff;
  AdviseHugePages(bytes + kOffset, 8 << 20);
  std::memset(bytes + kOffset, 0xee, 100);
  for (size_t i = 0; i < kSize; i += 4096) {
    ASSERT_EQ(bytes[i], i >> 12 & 0xff) << i;
  }
  munmap(memory, kSize);
}

}  // namespace
}  // namespace turbobus::moe

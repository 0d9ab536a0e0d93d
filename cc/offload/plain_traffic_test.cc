#include "offload/plain_traffic.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "offload/staged_transfer.h"
#include "offload/transfer.h"

namespace turbobus::offload {
namespace {

namespace fs = std::filesystem;
using topo::Direction;

constexpr size_t kHeaderBytes = 128;
constexpr size_t kRowBytes = 128;

/// The page of this process, or nothing if it has not one of its own.
std::string OwnPage() {
  std::string found;
  for (const auto& file : fs::directory_iterator(engine::LivePage::Folder())) {
    const std::string name = file.path().filename();
    if (!name.starts_with(std::to_string(getpid()) + ".")) continue;
    EXPECT_TRUE(found.empty()) << "two pages: " << name;
    std::ifstream stream(file.path(), std::ios::binary);
    found.assign(std::istreambuf_iterator<char>(stream), {});
  }
  return found;
}

int64_t Counter(const std::string& page, size_t row, size_t offset) {
  int64_t value = -1;
  const size_t at = kHeaderBytes + row * kRowBytes + offset;
  if (at + sizeof(value) <= page.size()) {
    std::memcpy(&value, page.data() + at, sizeof(value));
  }
  return value;
}
int64_t BytesOf(const std::string& page, size_t row) {
  return Counter(page, row, 72);
}
int64_t InFlight(const std::string& page, size_t row) {
  return Counter(page, row, 88);
}

// The page is the process's, so all is one test.
TEST(PlainTrafficTest, CopiesOfAllThreadsAreOnOnePageAndAForksOnItsOwn) {
  std::string directory = testing::TempDir() + "plain_traffic_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  setenv("JAX_TURBOBUS_LOCK_DIR", directory.c_str(), 1);
  unsetenv("JAX_TURBOBUS_TOP");

  constexpr int kCopies = 500;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      const std::vector<char> src(1000, 'x');
      std::vector<char> dst(src.size());
      for (int n = 0; n < kCopies; ++n) {
        const auto transfer =
            Transfer::StartOn(nullptr, Direction::kD2h, 3,
                              {{src.data(), dst.data(), 600},
                               {src.data() + 600, dst.data() + 600, 400}});
        EXPECT_TRUE(transfer->Wait().ok());
        EXPECT_EQ(dst, src);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const size_t row = 2 * 3 + 1;
  EXPECT_EQ(BytesOf(OwnPage(), row), 4 * kCopies * 1000);
  EXPECT_EQ(InFlight(OwnPage(), row), 0);
  EXPECT_EQ(BytesOf(OwnPage(), row - 1), 0);
  {
    const PlainTraffic now(Direction::kH2d, 1'000'000, 77);
    EXPECT_EQ(InFlight(OwnPage(), 2 * 63), 77) << "devices beyond share a row";
  }
  EXPECT_EQ(BytesOf(OwnPage(), 2 * 63), 77);

  const std::vector<char> src(1000, 'y');
  std::vector<char> dst(src.size());
  const auto staged = StagedTransfer::Start(Direction::kH2d, 5,
                                            {{src.data(), dst.data(), 1000}});
  staged->Land();
  EXPECT_EQ(dst, src);
  EXPECT_EQ(BytesOf(OwnPage(), 2 * 5), 1000);

  const std::string before = OwnPage();
  const pid_t child = fork();
  if (child == 0) {
    {
      const PlainTraffic own(Direction::kD2h, 3, 5);
    }
    _exit(BytesOf(OwnPage(), row) == 5 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(OwnPage(), before);
  unsetenv("JAX_TURBOBUS_LOCK_DIR");
  fs::remove_all(directory);
}

}  // namespace
}  // namespace turbobus::offload

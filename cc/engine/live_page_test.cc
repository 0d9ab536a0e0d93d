#include "engine/live_page.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "engine/fake_streams.h"
#include "engine/host_engine.h"
#include "engine/recorder.h"
#include "engine/stream_engine.h"

namespace turbobus::engine {
namespace {

namespace fs = std::filesystem;
using topo::Direction;

// Offsets that docs/engine.md gives.
constexpr size_t kHeaderBytes = 128;
constexpr size_t kRowBytes = 128;

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
T At(const std::string& bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

struct RowBytes {
  int64_t bytes;
  int64_t blocks;
  int64_t in_flight;
  uint32_t states;
};

RowBytes RowAt(const std::string& bytes, size_t row) {
  const size_t at = kHeaderBytes + row * kRowBytes;
  return {At<int64_t>(bytes, at + 72), At<int64_t>(bytes, at + 80),
          At<int64_t>(bytes, at + 88), At<uint32_t>(bytes, at + 96)};
}

class LivePageTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "live_page_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory = name;
    setenv("JAX_TURBOBUS_LOCK_DIR", name.c_str(), 1);
    unsetenv("JAX_TURBOBUS_TOP");
  }
  void TearDown() override {
    unsetenv("JAX_TURBOBUS_TOP");
    unsetenv("JAX_TURBOBUS_LOCK_DIR");
    fs::remove_all(directory);
  }

  static std::unique_ptr<LivePage> Make(size_t num_rows = 2) {
    std::vector<LivePage::Row> rows(num_rows);
    for (size_t i = 0; i < num_rows; ++i) {
      rows[i].name = "lane " + std::to_string(i);
      rows[i].gpu = static_cast<int>(i);
    }
    auto page = LivePage::Create(LivePage::Kind::kHost, rows);
    EXPECT_TRUE(page.ok()) << page.status();
    return std::move(page).value();
  }

  static std::vector<std::string> Files() {
    std::vector<std::string> files;
    if (!fs::exists(LivePage::Folder())) return files;
    for (const auto& file : fs::directory_iterator(LivePage::Folder())) {
      files.push_back(file.path().filename());
    }
    return files;
  }

  fs::path directory;
};

TEST_F(LivePageTest, TheLayoutIsTheDocumentedOne) {
  const std::vector<LivePage::Row> rows = {
      {.name = "gpu3 d2h via gpu1",
       .gpu = 3,
       .relay = 1,
       .direction = Direction::kD2h,
       .bandwidth_bytes_per_s = 5e9},
      {.name = std::string(100, 'x'), .is_link = true}};
  auto page = LivePage::Create(LivePage::Kind::kEmulated, rows);
  ASSERT_TRUE(page.ok()) << page.status();
  (*page)->AddTransfers(3, 1);
  (*page)->AddBytes(0, 1000, 2, 500);
  (*page)->SetStates(0, LivePage::kBackedOff);
  (*page)->SetLooked(42);
  const std::string bytes = Read((*page)->path());
  ASSERT_EQ(bytes.size(), kHeaderBytes + 2 * kRowBytes);
  EXPECT_EQ(bytes.substr(0, 8), "TBUSLIVE");
  EXPECT_EQ(At<uint32_t>(bytes, 8), 1U);
  EXPECT_EQ(At<uint32_t>(bytes, 12), kHeaderBytes);
  EXPECT_EQ(At<uint32_t>(bytes, 16), kRowBytes);
  EXPECT_EQ(At<uint32_t>(bytes, 20), 2U);
  EXPECT_EQ(At<uint32_t>(bytes, 24), 2U);
  EXPECT_EQ(At<int64_t>(bytes, 32), getpid());
  EXPECT_EQ(At<int64_t>(bytes, 40), 3);
  EXPECT_EQ(At<int64_t>(bytes, 48), 1);
  EXPECT_EQ(At<int64_t>(bytes, 56), 42);
  EXPECT_STREQ(bytes.data() + kHeaderBytes, "gpu3 d2h via gpu1");
  EXPECT_EQ(At<int32_t>(bytes, kHeaderBytes + 48), 3);
  EXPECT_EQ(At<int32_t>(bytes, kHeaderBytes + 52), 1);
  EXPECT_EQ(At<uint32_t>(bytes, kHeaderBytes + 56), 1U);
  EXPECT_EQ(At<uint32_t>(bytes, kHeaderBytes + 60), 0U);
  EXPECT_EQ(At<double>(bytes, kHeaderBytes + 64), 5e9);
  const RowBytes row = RowAt(bytes, 0);
  EXPECT_EQ(row.bytes, 1000);
  EXPECT_EQ(row.blocks, 2);
  EXPECT_EQ(row.in_flight, 500);
  EXPECT_EQ(row.states, 1U);
  EXPECT_STREQ(bytes.data() + kHeaderBytes + kRowBytes,
               std::string(47, 'x').c_str());
  EXPECT_EQ(At<uint32_t>(bytes, kHeaderBytes + kRowBytes + 60), 1U);
}

TEST_F(LivePageTest, FilesAreTheUsersAloneAndGoWithThePages) {
  auto one = Make();
  auto two = Make();
  EXPECT_EQ(Files().size(), 2U);
  struct stat info;
  ASSERT_EQ(stat(LivePage::Folder().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700U);
  ASSERT_EQ(stat(one->path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  one.reset();
  EXPECT_EQ(Files().size(), 1U);
  two.reset();
  EXPECT_TRUE(Files().empty());
}

TEST_F(LivePageTest, WhereItCannotBeMadeItSaysWhy) {
  setenv("JAX_TURBOBUS_TOP", "0", 1);
  EXPECT_EQ(LivePage::Create(LivePage::Kind::kHost, {}).status().code(),
            StatusCode::kFailedPrecondition);
  setenv("JAX_TURBOBUS_TOP", "maybe", 1);
  EXPECT_EQ(LivePage::Create(LivePage::Kind::kHost, {}).status(),
            InvalidArgument("JAX_TURBOBUS_TOP: expected 1 or 0, got 'maybe'"));
  EXPECT_TRUE(Files().empty());
  unsetenv("JAX_TURBOBUS_TOP");
  setenv("JAX_TURBOBUS_LOCK_DIR", "/proc", 1);  // for root, too
  const Status no_room = LivePage::Create(LivePage::Kind::kHost, {}).status();
  EXPECT_EQ(no_room.code(), StatusCode::kUnavailable);
  EXPECT_NE(no_room.message().find("JAX_TURBOBUS_LOCK_DIR"), std::string::npos);
  EXPECT_EQ(LivePage::Create(LivePage::Kind::kHost,
                             std::vector<LivePage::Row>(LivePage::kMaxRows + 1))
                .status()
                .code(),
            StatusCode::kUnavailable);
}

/// Whether this process may mount what only it sees; without rights of its own,
/// as the one user of a namespace.
bool CanMount() {
  const std::string user = "0 " + std::to_string(geteuid()) + " 1";
  const std::string group = "0 " + std::to_string(getegid()) + " 1";
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    std::ofstream("/proc/self/uid_map") << user;
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/gid_map") << group;
  }
  return mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

/// Mounts a file system of two pages at a folder and fills it; whether it
/// could.
bool FillUp(const std::string& folder) {
  if (!CanMount() ||
      mount("none", folder.c_str(), "tmpfs", 0, "size=8k") != 0) {
    return false;
  }
  std::ofstream file(folder + "/filler", std::ios::binary);
  return file.is_open() && !(file << std::string(1 << 16, 'x') << std::flush);
}

// https://github.com/jax-ml/jax/issues/26465: where a file system is full, a
// mapped file that was only lengthened ends the process when it is written.
TEST_F(LivePageTest, AFullFileSystemIsAnErrorAndNotTheEndOfTheProcess) {
  constexpr int kCannotMount = 77;
  const pid_t child = fork();
  if (child == 0) {
    if (!FillUp(std::getenv("JAX_TURBOBUS_LOCK_DIR"))) _exit(kCannotMount);
    const auto page =
        LivePage::Create(LivePage::Kind::kHost, std::vector<LivePage::Row>(4));
    const std::string said(page.status().message());
    _exit(page.status().code() == StatusCode::kUnavailable &&
                  said.find("gets no room") != std::string::npos &&
                  said.find("No space left") != std::string::npos
              ? 0
              : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kCannotMount) {
    GTEST_SKIP() << "no file system can be mounted here";
  }
  EXPECT_EQ(status, 0);
}

TEST_F(LivePageTest, AFolderThatIsNotTheUsersAloneIsRefused) {
  fs::create_directory(LivePage::Folder());
  ASSERT_EQ(chmod(LivePage::Folder().c_str(), 0770), 0);
  EXPECT_FALSE(LivePage::Create(LivePage::Kind::kHost, {}).ok());
  fs::remove(LivePage::Folder());
  fs::create_directory(directory / "elsewhere");
  ASSERT_EQ(chmod((directory / "elsewhere").c_str(), 0700), 0);
  fs::create_directory_symlink(directory / "elsewhere", LivePage::Folder());
  EXPECT_FALSE(LivePage::Create(LivePage::Kind::kHost, {}).ok());
}

TEST_F(LivePageTest, TheNextOneRemovesThoseOfTheDead) {
  auto page = Make();
  const std::string name = fs::path(page->path()).filename();
  const std::string tail = name.substr(name.find('.'));      // .start.ns.0
  const std::string space = tail.substr(tail.find('.', 1));  // .ns.0
  const fs::path folder = LivePage::Folder();
  const std::string pid = std::to_string(getpid());
  const std::string dead[] = {"2147483000.7" + space, pid + ".7" + space};
  const std::string others[] = {"notes.txt", "2147483000.7.1.0",
                                "2147483000.7" + space + "x",
                                "99999999999999.1.1.1", "..1.1"};
  for (const auto& file : dead) std::ofstream(folder / file) << "x";
  for (const auto& file : others) std::ofstream(folder / file) << "x";
  auto next = Make();
  for (const auto& file : dead) EXPECT_FALSE(fs::exists(folder / file)) << file;
  for (const auto& file : others)
    EXPECT_TRUE(fs::exists(folder / file)) << file;
  EXPECT_TRUE(fs::exists(page->path()));
}

TEST_F(LivePageTest, AForkWritesNothingAndRemovesNothing) {
  auto page = Make();
  page->AddBytes(0, 1, 1, 0);
  const std::string before = Read(page->path());
  const pid_t child = fork();
  if (child == 0) {
    page->AddBytes(0, 100, 1, 5);
    page->AddTransfers(1, 1);
    page->SetStates(1, LivePage::kDropped);
    page->SetLooked(7);
    page.reset();
    auto own = Make();
    _exit(own != nullptr && own->path().find(std::to_string(getpid())) !=
                                std::string::npos
              ? 0
              : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Read(page->path()), before);
}

TEST_F(LivePageTest, ThreadsAddUp) {
  auto page = Make();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 10'000; ++n) page->AddBytes(1, 3, 1, 2);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const RowBytes row = RowAt(Read(page->path()), 1);
  EXPECT_EQ(row.bytes, 120'000);
  EXPECT_EQ(row.blocks, 40'000);
  EXPECT_EQ(row.in_flight, 80'000);
  page->AddBytes(2, 1, 1, 1);  // no such row: nothing
}

TEST_F(LivePageTest, CountingABlockTakesNoTime) {
  auto page = Make();
  constexpr int kBlocks = 200'000;
  const auto start = std::chrono::steady_clock::now();
  for (int n = 0; n < kBlocks; ++n) {
    page->AddBytes(0, 0, 0, 4096);
    page->AddBytes(0, 4096, 1, -4096);
  }
  const std::chrono::duration<double, std::nano> elapsed =
      std::chrono::steady_clock::now() - start;
  RecordProperty("ns_per_block", std::to_string(elapsed.count() / kBlocks));
  std::printf("%.1f ns a block\n", elapsed.count() / kBlocks);
  // About 20 ns; sanitizers and busy machines take more.
  EXPECT_LT(elapsed.count() / kBlocks, 2000);
}

TEST_F(LivePageTest, TheRecordersLanesAndLinksAreOnIt) {
  topo::Path direct{.gpu = 0, .bandwidth_bytes_per_s = 1e9, .links = {0}};
  topo::Path relay = direct;
  relay.relay = 1;
  relay.links = {1};
  Options options;
  options.live_kind = LivePage::Kind::kHost;
  Recorder recorder({direct, relay}, 1.25, options, 0);
  ASSERT_EQ(Files().size(), 1U);
  const std::string path = LivePage::Folder() + "/" + Files()[0];
  sched::Block block;
  block.lane = 1;
  block.size_bytes = 1000;
  recorder.OnSubmit();
  recorder.OnIssue(block);
  EXPECT_EQ(RowAt(Read(path), 1).in_flight, 1000);
  EXPECT_EQ(At<int64_t>(Read(path), 40), 1);
  recorder.OnBlockDone(block, 0, {.id = 1, .start_ns = 0, .end_ns = 9});
  recorder.OnIssue(block);
  recorder.OnBlockDone(block, 0, {.id = 2, .status = Internal("broken")});
  recorder.OnLaneRemoved(1, Unavailable("gone"));
  recorder.OnTransferDone({});
  const std::string bytes = Read(path);
  EXPECT_EQ(RowAt(bytes, 1).bytes, 1000);
  EXPECT_EQ(RowAt(bytes, 1).blocks, 1);
  EXPECT_EQ(RowAt(bytes, 1).in_flight, 0);
  EXPECT_EQ(RowAt(bytes, 1).states, LivePage::kDropped);
  EXPECT_EQ(At<int64_t>(bytes, 40), 0);
  EXPECT_EQ(At<int64_t>(bytes, 48), 1);
  // Lanes first, then link 0 and link 1, each in and out.
  EXPECT_EQ(RowAt(bytes, 2 + 2).bytes, 1000);
  EXPECT_EQ(RowAt(bytes, 2 + 0).bytes, 0);
}

TEST_F(LivePageTest, AStreamEnginesPathsAreOnIt) {
  constexpr int64_t kKiB = 1024;
  auto fake = std::make_unique<FakeStreams>(2, 1);
  FakeStreams* const streams = fake.get();
  std::vector<topo::Path> paths;
  for (const int relay : {topo::kNoRelay, 1}) {
    paths.push_back(
        {.gpu = 0, .relay = relay, .bandwidth_bytes_per_s = 50e9, .links = {}});
  }
  for (const int gpu : {0, 1}) {
    paths.push_back({.gpu = gpu,
                     .direction = Direction::kD2h,
                     .bandwidth_bytes_per_s = 50e9,
                     .links = {}});
  }
  paths.push_back({.gpu = 1, .bandwidth_bytes_per_s = 50e9, .links = {}});
  auto engine = StreamEngine::Create(std::move(fake), paths,
                                     {.block_bytes = 64 * kKiB,
                                      .min_pooled_bytes = 128 * kKiB,
                                      .direct_latency_ns = 0,
                                      .relay_latency_ns = 0});
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_EQ((*engine)->Publish(), OkStatus());
  ASSERT_EQ(Files().size(), 1U);
  const std::string path = LivePage::Folder() + "/" + Files()[0];
  const transport::Stream stream = *streams->CreateStream(0);
  std::vector<std::byte> host(1000 * kKiB);
  std::vector<std::byte> device(host.size());
  streams->device.insert(device.data());
  CopyRequest request{.call = "h2d",
                      .gpu = 0,
                      .stream = stream,
                      .run = 1,
                      .src = host.data(),
                      .dst = device.data(),
                      .size_bytes = std::ssize(host)};
  ASSERT_EQ((*engine)->Copy(request), OkStatus());
  std::string bytes = Read(path);
  EXPECT_GT(RowAt(bytes, 0).in_flight, 0);
  EXPECT_GT(RowAt(bytes, 1).in_flight, 0);
  EXPECT_EQ(RowAt(bytes, 0).in_flight + RowAt(bytes, 1).in_flight,
            std::ssize(host));
  EXPECT_EQ(At<int64_t>(bytes, 40), 1);
  ASSERT_TRUE(streams->Drain());
  // What is too small to pool goes over XLA's stream: the rows after the paths.
  request.size_bytes = 4 * kKiB;
  ASSERT_EQ((*engine)->Copy(request), OkStatus());
  ASSERT_TRUE(streams->Drain());
  const StreamStats stats = (*engine)->stats();
  bytes = Read(path);
  // There; `stats` counts it for its link.
  const auto plain = RowAt(bytes, paths.size());
  EXPECT_EQ(plain.bytes, 4 * kKiB);
  EXPECT_EQ(RowAt(bytes, 0).bytes + plain.bytes, stats.paths[0].size_bytes);
  EXPECT_EQ(RowAt(bytes, 0).blocks + plain.blocks, stats.paths[0].num_blocks);
  EXPECT_EQ(RowAt(bytes, 1).bytes, stats.paths[1].size_bytes);
  EXPECT_EQ(RowAt(bytes, 1).blocks, stats.paths[1].num_blocks);
  for (const size_t row : {0, 1}) EXPECT_EQ(RowAt(bytes, row).in_flight, 0);
  EXPECT_EQ(At<int64_t>(bytes, 40), 0);
  EXPECT_EQ(At<int64_t>(bytes, 48), 1);
  EXPECT_GT(At<int64_t>(bytes, 56), 0);
  // A relay that fails is dropped, and seen to be.
  (*engine)->InjectFault(1);
  request.size_bytes = std::ssize(host);
  ASSERT_EQ((*engine)->Copy(request), OkStatus());
  ASSERT_TRUE(streams->Drain());
  EXPECT_EQ(RowAt(Read(path), 1).states & LivePage::kDropped,
            LivePage::kDropped);
}

}  // namespace
}  // namespace turbobus::engine

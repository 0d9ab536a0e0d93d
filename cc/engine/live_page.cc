#include "engine/live_page.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/environment.h"
#include "engine/fork.h"
#include "engine/live_folder.h"

namespace turbobus::engine {

// The layout of version 1. Readers of other versions leave a file alone.
struct LivePage::Header {
  std::atomic<uint64_t> magic;
  uint32_t version;
  uint32_t header_bytes;
  uint32_t row_bytes;
  uint32_t num_rows;
  uint32_t kind;
  uint32_t reserved;
  int64_t pid;
  std::atomic<int64_t> num_in_flight;
  std::atomic<int64_t> num_ended;
  std::atomic<int64_t> looked_ns;
  char padding[64];
};

struct LivePage::Counters {
  char name[48];  // UTF-8, ends with a zero
  int32_t gpu;
  int32_t relay;
  uint32_t direction;
  uint32_t is_link;
  double bandwidth_bytes_per_s;
  std::atomic<int64_t> num_bytes;
  std::atomic<int64_t> num_blocks;
  std::atomic<int64_t> num_bytes_in_flight;
  std::atomic<uint32_t> states;
  char padding[28];
};

namespace {

constexpr auto kMagic = std::bit_cast<uint64_t>(
    std::array<char, 8>{'T', 'B', 'U', 'S', 'L', 'I', 'V', 'E'});
constexpr uint32_t kVersion = 1;
constexpr auto kRelaxed = std::memory_order_relaxed;

/// Pages that live as long as the process, for `exit`. Lock-free: a fork never
/// finds it half changed.
struct AtExit {
  std::string path;
  uint64_t generation;
  AtExit* next;
};
std::atomic<AtExit*> g_at_exit = nullptr;

}  // namespace

LivePage::LivePage(std::string path, void* memory, size_t size_bytes,
                   size_t num_rows)
    : path_(std::move(path)),
      memory_(memory),
      size_bytes_(size_bytes),
      num_rows_(num_rows),
      generation_(ForkGeneration()) {}

StatusOr<std::unique_ptr<LivePage>> LivePage::Create(
    Kind kind, const std::vector<Row>& rows) {
  static_assert(sizeof(Header) == 128 && sizeof(Counters) == 128);
  static_assert(std::atomic<int64_t>::is_always_lock_free);
  static_assert(std::endian::native == std::endian::little);
  TB_RETURN_IF_ERROR(CheckSwitch("JAX_TURBOBUS_TOP"));
  if (IsSwitchedOff("JAX_TURBOBUS_TOP")) {
    return FailedPrecondition("JAX_TURBOBUS_TOP=0 says not to");
  }
  if (rows.size() > kMaxRows) {
    return Unavailable(std::to_string(rows.size()) +
                       " lanes and links are more than a page of live "
                       "counters has room for");
  }
  const size_t size_bytes = sizeof(Header) + rows.size() * sizeof(Counters);
  TB_ASSIGN_OR_RETURN(LiveFile file, MakeLiveFile(Folder(), size_bytes));
  void* const memory =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  close(file.fd);
  if (memory == MAP_FAILED) {
    unlink(file.path.c_str());
    return Unavailable(file.path + " cannot be mapped");
  }
  std::unique_ptr<LivePage> page(
      new LivePage(std::move(file.path), memory, size_bytes, rows.size()));
  // Fresh files are zero: nothing needs a constructor but the atomics' life.
  auto* const header = new (memory) Header();
  header->version = kVersion;
  header->header_bytes = sizeof(Header);
  header->row_bytes = sizeof(Counters);
  header->num_rows = static_cast<uint32_t>(rows.size());
  header->kind = static_cast<uint32_t>(kind);
  header->pid = getpid();
  for (size_t i = 0; i < rows.size(); ++i) {
    auto* const row = new (&page->counters(i)) Counters();
    rows[i].name.copy(row->name, sizeof(row->name) - 1);
    row->gpu = rows[i].gpu;
    row->relay = rows[i].relay;
    row->direction = static_cast<uint32_t>(rows[i].direction);
    row->is_link = rows[i].is_link ? 1 : 0;
    row->bandwidth_bytes_per_s = rows[i].bandwidth_bytes_per_s;
  }
  // Last: what has no magic is not looked at.
  header->magic.store(kMagic, std::memory_order_release);
  return page;
}

LivePage::~LivePage() {
  Remove();
  munmap(memory_, size_bytes_);
}

std::string LivePage::Folder() {
  const char* const parent = std::getenv("JAX_TURBOBUS_LOCK_DIR");
  return std::string(parent != nullptr && *parent != '\0' ? parent : "/tmp") +
         "/jax_turbobus-top-" + std::to_string(geteuid());
}

bool LivePage::is_mine() const { return ForkGeneration() == generation_; }

void LivePage::Remove() const {
  if (is_mine()) unlink(path_.c_str());
}

LivePage::Header& LivePage::header() const {
  return *static_cast<Header*>(memory_);
}

LivePage::Counters& LivePage::counters(size_t row) const {
  return reinterpret_cast<Counters*>(static_cast<char*>(memory_) +
                                     sizeof(Header))[row];
}

void LivePage::AddTransfers(int64_t in_flight, int64_t ended) {
  if (!is_mine()) return;
  header().num_in_flight.fetch_add(in_flight, kRelaxed);
  if (ended != 0) header().num_ended.fetch_add(ended, kRelaxed);
}

void LivePage::AddBytes(size_t row, int64_t bytes, int64_t blocks,
                        int64_t in_flight) {
  if (row >= num_rows_ || !is_mine()) return;
  Counters& to = counters(row);
  if (bytes != 0) to.num_bytes.fetch_add(bytes, kRelaxed);
  if (blocks != 0) to.num_blocks.fetch_add(blocks, kRelaxed);
  if (in_flight != 0) to.num_bytes_in_flight.fetch_add(in_flight, kRelaxed);
}

void LivePage::SetStates(size_t row, uint32_t states) {
  if (row >= num_rows_ || !is_mine()) return;
  counters(row).states.store(states, kRelaxed);
}

void LivePage::SetLooked(int64_t now_ns) {
  if (is_mine()) header().looked_ns.store(now_ns, kRelaxed);
}

void LivePage::RemoveAtExit() {
  auto* const entry = new AtExit{path_, generation_, g_at_exit.load(kRelaxed)};
  while (!g_at_exit.compare_exchange_weak(entry->next, entry)) {
  }
  static const int registered = std::atexit([] {
    for (const AtExit* at = g_at_exit.load(); at != nullptr; at = at->next) {
      if (at->generation == ForkGeneration()) unlink(at->path.c_str());
    }
  });
  static_cast<void>(registered);
}

}  // namespace turbobus::engine

#include "moe/huge_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>

namespace turbobus::moe {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
// Smaller results come from memory that malloc keeps and reuses.
constexpr int64_t kLeastBytes = 4 << 20;
// A program's temporaries are this many times one of its results at most;
// beyond that the mapping is somebody else's too.
constexpr uintptr_t kMostTimes = 32;

struct Range {
  uintptr_t begin;
  uintptr_t end;
};

/// Linux's `struct procmap_query` (6.11): which mapping holds an address. Not
/// in the headers of the systems that we build on.
struct ProcmapQuery {
  uint64_t size;
  uint64_t query_flags;
  uint64_t query_addr;
  uint64_t vma_start;
  uint64_t vma_end;
  uint64_t vma_flags;
  uint64_t vma_page_size;
  uint64_t vma_offset;
  uint64_t inode;
  uint32_t dev_major;
  uint32_t dev_minor;
  uint32_t vma_name_size;
  uint32_t build_id_size;
  uint64_t vma_name_addr;
  uint64_t build_id_addr;
};

/// The private, writable, anonymous mapping that holds `address`, if it can be
/// found out.
std::optional<Range> MappingOf(uintptr_t address) {
#ifdef __linux__
  constexpr uint64_t kReadable = 1;
  constexpr uint64_t kWritable = 2;
  constexpr uint64_t kShared = 8;
  const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  ProcmapQuery query = {};
  query.size = sizeof(query);
  query.query_addr = address;
  const int result =
      ioctl(fd, _IOWR('f', 17, ProcmapQuery), &query);  // PROCMAP_QUERY
  close(fd);
  const uint64_t access = kReadable | kWritable;
  if (result != 0 || (query.vma_flags & (access | kShared)) != access ||
      query.inode != 0) {
    return std::nullopt;
  }
  return Range{static_cast<uintptr_t>(query.vma_start),
               static_cast<uintptr_t>(query.vma_end)};
#else
  static_cast<void>(address);
  return std::nullopt;
#endif
}

}  // namespace

void AdviseHugePages(void* data, int64_t size_bytes) {
  if (size_bytes < kLeastBytes) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t size = static_cast<uintptr_t>(size_bytes);
  Range range = {address, address + size};
  if (const auto mapping = MappingOf(address);
      mapping.has_value() && mapping->end >= range.end &&
      mapping->end - mapping->begin <= kMostTimes * size) {
    range = *mapping;
  }
  const uintptr_t begin = (range.begin + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = range.end & ~(kHugePage - 1);
  if (begin >= end) return;
#ifdef MADV_HUGEPAGE
  static_cast<void>(
      madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#endif
}

}  // namespace turbobus::moe

#include "transport/host/memory_copy.h"

#include <sys/mman.h>

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace turbobus::transport::host {
namespace {

constexpr uintptr_t kHugePageBytes = 2 << 20;

#if defined(__x86_64__)
constexpr size_t kVectorBytes = 32;
constexpr size_t kStepBytes = 4 * kVectorBytes;

__attribute__((target("avx"))) void StreamSteps(char* dst, const char* src,
                                                size_t num_steps) {
  for (size_t i = 0; i < num_steps; ++i) {
    const auto* from = reinterpret_cast<const __m256i*>(src + i * kStepBytes);
    auto* to = reinterpret_cast<__m256i*>(dst + i * kStepBytes);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    const __m256i c = _mm256_loadu_si256(from + 2);
    const __m256i d = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
  }
  // Streaming stores are weakly ordered; a later release must cover them.
  _mm_sfence();
}

bool HasAvx() {
  static const bool has_avx = __builtin_cpu_supports("avx") != 0;
  return has_avx;
}
#endif

}  // namespace

void StreamingCopy(void* dst, const void* src, size_t size_bytes) {
#if defined(__x86_64__)
  if (HasAvx() && size_bytes > 2 * kStepBytes) {
    auto* to = static_cast<char*>(dst);
    const auto* from = static_cast<const char*>(src);
    // Streaming stores want an aligned destination.
    const size_t head =
        (kVectorBytes - reinterpret_cast<uintptr_t>(to) % kVectorBytes) %
        kVectorBytes;
    const size_t num_steps = (size_bytes - head) / kStepBytes;
    const size_t tail = head + num_steps * kStepBytes;
    std::memcpy(to, from, head);
    StreamSteps(to + head, from + head, num_steps);
    std::memcpy(to + tail, from + tail, size_bytes - tail);
    return;
  }
#endif
  std::memcpy(dst, src, size_bytes);
}

void AdviseHugePages(void* dst, size_t size_bytes) {
#if defined(MADV_HUGEPAGE)
  const auto begin = reinterpret_cast<uintptr_t>(dst);
  const uintptr_t first =
      (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t last = (begin + size_bytes) / kHugePageBytes * kHugePageBytes;
  if (last <= first) return;
  // Refused where the kernel has no huge pages: then the copy is only slower.
  static_cast<void>(
      madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE));
#else
  static_cast<void>(dst);
  static_cast<void>(size_bytes);
#endif
}

}  // namespace turbobus::transport::host

#ifndef TURBOBUS_TRANSPORT_HOST_MEMORY_COPY_H_
#define TURBOBUS_TRANSPORT_HOST_MEMORY_COPY_H_

#include <cstddef>
#include <cstdint>

namespace turbobus::transport::host {

/// A copy of at least this many bytes is better streamed past the caches.
inline constexpr int64_t kStreamingBytes = 4 << 20;

/// memcpy for one piece of a copy too large for the caches: reads once, writes
/// without reading the destination's lines first. The bytes are visible to any
/// thread that synchronises with the caller afterwards.
///
/// Measured on a 2-core AMD EPYC guest (32 MiB L3), 256 MiB between resident
/// pages, 2026-11-30: 29 GB/s against 20.5 for memcpy in pieces of 1 MiB.
void StreamingCopy(void* dst, const void* src, size_t size_bytes);

/// Asks for huge pages behind the large, page-aligned inside of a destination
/// that is about to be overwritten: fresh pages then cost a fault per 2 MiB
/// instead of per 4 KiB. A hint only; the bytes are unchanged.
void AdviseHugePages(void* dst, size_t size_bytes);

}  // namespace turbobus::transport::host

#endif  // TURBOBUS_TRANSPORT_HOST_MEMORY_COPY_H_

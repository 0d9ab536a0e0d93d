#ifndef TURBOBUS_MOE_HUGE_PAGES_H_
#define TURBOBUS_MOE_HUGE_PAGES_H_

#include <cstdint>

namespace turbobus::moe {

/// Asks the system to back a large result, about to be written for the first
/// time, with huge pages; smaller ones are left alone. The first touch of fresh
/// pages is most of what an exchange on a CPU costs (docs/moe.md).
///
/// XLA takes all temporaries of a program from one allocation, and what experts
/// make of our rows lies beside them. So the hint covers the whole mapping that
/// holds the result, if the system can tell which that is and it is no more
/// than a few times as large. A hint: contents never change, failures are
/// ignored.
void AdviseHugePages(void* data, int64_t size_bytes);

}  // namespace turbobus::moe

#endif  // TURBOBUS_MOE_HUGE_PAGES_H_

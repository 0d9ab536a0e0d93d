#ifndef TURBOBUS_OFFLOAD_PLAIN_TRAFFIC_H_
#define TURBOBUS_OFFLOAD_PLAIN_TRAFFIC_H_

#include <cstddef>
#include <cstdint>

#include "engine/live_page.h"
#include "topo/path.h"

namespace turbobus::offload {

/// Lets other processes see a copy that no engine makes, for as long as this
/// lives. The first one of a process makes its page; where that cannot be,
/// nothing is seen. Thread-safe, also across forks: a child has a page of its
/// own.
class PlainTraffic {
 public:
  PlainTraffic(topo::Direction direction, int device, int64_t size_bytes);
  ~PlainTraffic();
  PlainTraffic(const PlainTraffic&) = delete;
  PlainTraffic& operator=(const PlainTraffic&) = delete;

 private:
  engine::LivePage* const page_;  // of the process; null: none
  const size_t row_;
  const int64_t size_bytes_;
};

}  // namespace turbobus::offload

#endif  // TURBOBUS_OFFLOAD_PLAIN_TRAFFIC_H_

#ifndef TURBOBUS_OFFLOAD_IN_FLIGHT_H_
#define TURBOBUS_OFFLOAD_IN_FLIGHT_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "offload/transfer.h"

namespace turbobus::offload {

/// Transfers between their start and their done, found by the buffer they
/// write to.
///
/// Thread-safe; never blocks. A transfer whose `done` never comes (its program
/// failed in between) stays until `TakeRun`, or until the buffer's address is
/// started anew in a later run: both callers must wait for what they are given
/// before the memory is used for anything else.
class InFlight {
 public:
  using Transfers = std::vector<std::shared_ptr<Transfer>>;

  /// Returns what earlier runs left in flight on this buffer.
  [[nodiscard]] Transfers Insert(int device, const void* buffer, int64_t run_id,
                                 std::shared_ptr<Transfer> transfer);

  /// Removes and returns the oldest transfer of this run into `buffer`, or
  /// null.
  std::shared_ptr<Transfer> Take(int device, const void* buffer,
                                 int64_t run_id);

  /// Removes and returns all that `run_id` has in flight on `device`.
  Transfers TakeRun(int device, int64_t run_id);

  size_t size() const;

 private:
  struct Entry {
    int64_t run_id;
    std::shared_ptr<Transfer> transfer;
  };
  using Key = std::pair<int, const void*>;

  mutable std::mutex mutex_;
  std::map<Key, std::list<Entry>> entries_;  // guarded by mutex_
};

/// The table of this process; lives until it ends.
InFlight& ProcessInFlight();

}  // namespace turbobus::offload

#endif  // TURBOBUS_OFFLOAD_IN_FLIGHT_H_

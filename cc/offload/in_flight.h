#ifndef TURBOBUS_OFFLOAD_IN_FLIGHT_H_
#define TURBOBUS_OFFLOAD_IN_FLIGHT_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "offload/staged_transfer.h"

namespace turbobus::offload {

/// Transfers between their start and their done, found by the buffer they
/// are for.
///
/// Thread-safe; never blocks. One whose done never comes (its program failed in
/// between) is dropped when a later run starts one for the same address, or by
/// `DropRun`; it touches no memory of the program.
class InFlight {
 public:
  using TransferPtr = std::shared_ptr<StagedTransfer>;

  void Insert(int device, const void* buffer, int64_t run_id,
              TransferPtr transfer);

  /// Removes and returns this run's oldest transfer for `buffer`, or null.
  TransferPtr Take(int device, const void* buffer, int64_t run_id);

  /// Forgets all that `run_id` has in flight on `device`.
  void DropRun(int device, int64_t run_id);

  size_t size() const;

 private:
  struct Entry {
    int64_t run_id;
    TransferPtr transfer;
  };
  using Key = std::pair<int, const void*>;

  mutable std::mutex mutex_;
  std::map<Key, std::list<Entry>> entries_;  // guarded by mutex_
};

/// The table of this process; lives until it ends.
InFlight& ProcessInFlight();

}  // namespace turbobus::offload

#endif  // TURBOBUS_OFFLOAD_IN_FLIGHT_H_

#ifndef TURBOBUS_MOE_CUDA_KNOWN_TOTALS_H_
#define TURBOBUS_MOE_CUDA_KNOWN_TOTALS_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "moe/cuda/events.h"
#include "moe/cuda/kernels.h"

namespace turbobus::moe::cuda {

/// How many rows of this rank's tokens each rank has, as the host was told when
/// a plan was made: what exchanges by the same slots need not ask the GPU. The
/// slots are known by the buffer that they were written to; whoever asks must
/// know otherwise that it still has them.
///
/// Of an address it keeps the latest, of a device a bounded number.
/// Thread-safe; blocks nobody.
class KnownTotals {
 public:
  struct Key {
    int device = 0;
    int64_t run_id = 0;
    const void* slots = nullptr;
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  /// Of a plan.
  struct Record {
    Shape shape;               // But for `row_bytes`.
    std::vector<int> devices;  // Of the ranks.
    /// The GPU writes `totals` until then; null: they are there.
    SharedEvent counted = nullptr;
    std::shared_ptr<const int32_t> totals;  // [num_ranks]
  };

  /// Of dispatches, by their slots.
  static KnownTotals& Process();
  /// Of dispatches to come, by what counting them early has returned.
  static KnownTotals& Early();

  explicit KnownTotals(size_t most_a_device) : most_a_device_(most_a_device) {}

  /// Forgets the oldest of the device if there are too many.
  void Put(const Key& key, Record record);

  /// Something else has been written to the buffer.
  void Forget(const Key& key);

  /// The record of these slots; none if that is of another shape, or of ranks
  /// elsewhere.
  std::optional<Record> Find(const Key& key, const Shape& shape,
                             const std::vector<int>& devices) const;

 private:
  struct Entry {
    Record record;
    uint64_t serial = 0;
  };

  const size_t most_a_device_;
  mutable std::mutex mutex_;
  // All guarded by mutex_. `order_` has each key as often as it was put; only
  // the entry of the same serial counts.
  std::map<Key, Entry> records_;
  std::map<int, std::deque<std::pair<Key, uint64_t>>> order_;
  uint64_t next_serial_ = 0;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_KNOWN_TOTALS_H_

#include "moe/cuda/known_totals.h"

#include <tuple>
#include <utility>

namespace turbobus::moe::cuda {
namespace {

/// A program may read the slots of all its layers once more, backwards. More
/// than so many plans ago the host asks the GPU again.
constexpr size_t kMostADevice = 1024;
/// What was counted early holds pinned memory: not of more chunks.
constexpr size_t kMostEarly = 64;

/// What the number of rows depends on.
auto Counted(const Shape& shape) {
  return std::tie(shape.rank, shape.num_ranks, shape.num_tokens, shape.top_k,
                  shape.num_experts, shape.num_local_experts, shape.num_rows,
                  shape.expert_capacity);
}

}  // namespace

KnownTotals& KnownTotals::Process() {
  static auto* const totals = new KnownTotals(kMostADevice);
  return *totals;
}

KnownTotals& KnownTotals::Early() {
  static auto* const totals = new KnownTotals(kMostEarly);
  return *totals;
}

void KnownTotals::Put(const Key& key, Record record) {
  // What goes is destroyed without the lock: it may give memory back.
  std::vector<Record> gone;
  const std::lock_guard lock(mutex_);
  Entry& entry = records_[key];
  gone.push_back(std::exchange(entry.record, std::move(record)));
  entry.serial = next_serial_++;
  auto& order = order_[key.device];
  order.emplace_back(key, entry.serial);
  while (order.size() > most_a_device_) {
    const auto [oldest, serial] = order.front();
    order.pop_front();
    const auto it = records_.find(oldest);
    if (it == records_.end() || it->second.serial != serial) continue;
    gone.push_back(std::move(it->second.record));
    records_.erase(it);
  }
}

void KnownTotals::Forget(const Key& key) {
  Record gone;  // Destroyed without the lock, as above.
  const std::lock_guard lock(mutex_);
  const auto it = records_.find(key);
  if (it == records_.end()) return;
  gone = std::move(it->second.record);
  records_.erase(it);
}

std::optional<KnownTotals::Record> KnownTotals::Find(
    const Key& key, const Shape& shape, const std::vector<int>& devices) const {
  const std::lock_guard lock(mutex_);
  const auto it = records_.find(key);
  if (it == records_.end()) return std::nullopt;
  const Record& record = it->second.record;
  if (Counted(record.shape) != Counted(shape) || record.devices != devices) {
    return std::nullopt;
  }
  return record;
}

}  // namespace turbobus::moe::cuda

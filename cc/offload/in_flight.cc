#include "offload/in_flight.h"

#include <iterator>

namespace turbobus::offload {

void InFlight::Insert(int device, const void* buffer, int64_t run_id,
                      TransferPtr transfer) {
  std::list<Entry> dropped;  // destroyed after the lock has been released
  const std::lock_guard lock(mutex_);
  std::list<Entry>& entries = entries_[{device, buffer}];
  for (auto it = entries.begin(); it != entries.end();) {
    const auto entry = it++;
    if (entry->run_id != run_id) dropped.splice(dropped.end(), entries, entry);
  }
  entries.push_back({run_id, std::move(transfer)});
}

InFlight::TransferPtr InFlight::Take(int device, const void* buffer,
                                     int64_t run_id) {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find({device, buffer});
  if (it == entries_.end()) return nullptr;
  for (auto entry = it->second.begin(); entry != it->second.end(); ++entry) {
    if (entry->run_id != run_id) continue;
    TransferPtr transfer = std::move(entry->transfer);
    it->second.erase(entry);
    if (it->second.empty()) entries_.erase(it);
    return transfer;
  }
  return nullptr;
}

void InFlight::DropRun(int device, int64_t run_id) {
  std::list<Entry> dropped;
  const std::lock_guard lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->first.first == device) {
      std::list<Entry>& entries = it->second;
      for (auto next = entries.begin(); next != entries.end();) {
        const auto entry = next++;
        if (entry->run_id == run_id)
          dropped.splice(dropped.end(), entries, entry);
      }
    }
    it = it->second.empty() ? entries_.erase(it) : std::next(it);
  }
}

size_t InFlight::size() const {
  size_t size = 0;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, entries] : entries_) size += entries.size();
  return size;
}

InFlight& ProcessInFlight() {
  static auto* const table = new InFlight;
  return *table;
}

}  // namespace turbobus::offload

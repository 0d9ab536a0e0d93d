#include "offload/in_flight.h"

namespace turbobus::offload {

InFlight::Transfers InFlight::Insert(int device, const void* buffer,
                                     int64_t run_id,
                                     std::shared_ptr<Transfer> transfer) {
  Transfers abandoned;
  const std::lock_guard lock(mutex_);
  std::list<Entry>& entries = entries_[{device, buffer}];
  std::erase_if(entries, [&](Entry& entry) {
    if (entry.run_id == run_id) return false;
    abandoned.push_back(std::move(entry.transfer));
    return true;
  });
  entries.push_back({run_id, std::move(transfer)});
  return abandoned;
}

std::shared_ptr<Transfer> InFlight::Take(int device, const void* buffer,
                                         int64_t run_id) {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find({device, buffer});
  if (it == entries_.end()) return nullptr;
  for (auto entry = it->second.begin(); entry != it->second.end(); ++entry) {
    if (entry->run_id != run_id) continue;
    std::shared_ptr<Transfer> transfer = std::move(entry->transfer);
    it->second.erase(entry);
    if (it->second.empty()) entries_.erase(it);
    return transfer;
  }
  return nullptr;
}

InFlight::Transfers InFlight::TakeRun(int device, int64_t run_id) {
  Transfers taken;
  const std::lock_guard lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->first.first == device) {
      std::erase_if(it->second, [&](Entry& entry) {
        if (entry.run_id != run_id) return false;
        taken.push_back(std::move(entry.transfer));
        return true;
      });
    }
    it = it->second.empty() ? entries_.erase(it) : std::next(it);
  }
  return taken;
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

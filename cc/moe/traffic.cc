#include "moe/traffic.h"

namespace turbobus::moe {

const char* ScheduleName(Schedule schedule) {
  switch (schedule) {
    case Schedule::kPacked:
      return "packed";
    case Schedule::kBroadcast:
      return "broadcast";
    case Schedule::kDirect:
      return "direct";
    case Schedule::kRelay:
      return "relay";
  }
  return "unknown";
}

TrafficLog& TrafficLog::Process() {
  static TrafficLog* const log = new TrafficLog;  // Handlers may outlive main.
  return *log;
}

void TrafficLog::Add(const std::string& op, Schedule schedule, int num_ranks,
                     const std::vector<int64_t>& bytes) {
  std::lock_guard lock(mutex_);
  Traffic& traffic = traffic_[{op, schedule, num_ranks}];
  if (traffic.num_calls == 0) {
    traffic = {op,        schedule, "memory",
               num_ranks, 0,        std::vector<int64_t>(bytes.size())};
  }
  ++traffic.num_calls;
  for (size_t i = 0; i < bytes.size(); ++i) traffic.bytes[i] += bytes[i];
}

std::vector<Traffic> TrafficLog::Read() const {
  std::lock_guard lock(mutex_);
  std::vector<Traffic> all;
  for (const auto& [kind, traffic] : traffic_) all.push_back(traffic);
  return all;
}

void TrafficLog::Reset() {
  std::lock_guard lock(mutex_);
  traffic_.clear();
}

}  // namespace turbobus::moe

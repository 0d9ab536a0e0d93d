#include "moe/cuda/gpu_traffic.h"

#include <cuda_runtime_api.h>

#include <string>
#include <tuple>
#include <utility>

#include "moe/cuda/events.h"
#include "transport/cuda/device_guard.h"

namespace turbobus::moe::cuda {
namespace {

const char* OpName(GpuTraffic::Op op) {
  switch (op) {
    case GpuTraffic::Op::kDispatch:
      return "dispatch";
    case GpuTraffic::Op::kCombine:
      return "combine";
    case GpuTraffic::Op::kDispatchGrad:
      return "dispatch_grad";
    case GpuTraffic::Op::kCombineGrad:
      return "combine_grad";
  }
  return "unknown";
}

const char* PathName(Path::Kind kind) {
  switch (kind) {
    case Path::Kind::kPeer:
      return "peer";
    case Path::Kind::kHost:
      return "host";
    case Path::Kind::kRelay:
      return "relay";
  }
  return "unknown";
}

/// The path from one rank to another.
std::string PathOf(const GpuTraffic::Kind& kind, int from, int to) {
  if (kind.means == GpuTraffic::Means::kMail) return "mail";
  if (kind.means == GpuTraffic::Means::kPeerMemory) return "peer";
  // What has several readers is in host memory.
  if (kind.schedule == Schedule::kBroadcast) return "host";
  Wiring wiring;
  wiring.devices = kind.devices;
  wiring.has_relays = kind.has_relays;
  return PathName(wiring.Between(from, to).kind);
}

}  // namespace

GpuTraffic& GpuTraffic::Process() {
  static auto* const traffic = new GpuTraffic;  // Handlers may outlive main.
  return *traffic;
}

GpuTraffic::Entry* GpuTraffic::Find(const Kind& kind) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = kinds_.find(kind); it != kinds_.end()) {
      return it->second;
    }
  }
  return Add(kind);
}

GpuTraffic::Entry* GpuTraffic::Add(const Kind& kind) {
  Counted counted = {.op = kind.op,
                     .schedule = kind.schedule,
                     .num_ranks = kind.num_ranks,
                     .paths = {}};
  for (int from = 0; from < kind.num_ranks; ++from) {
    for (int to = 0; to < kind.num_ranks; ++to) {
      // A call of one rank has no pair, but is one.
      const bool is_pair = from != to || kind.num_ranks == 1;
      counted.paths.push_back(is_pair ? PathOf(kind, from, to) : "");
    }
  }
  const std::lock_guard lock(mutex_);
  const auto [it, is_new] = entries_.try_emplace(std::move(counted));
  Entry* const entry = &it->second;
  if (is_new) {
    const int64_t wanted = int64_t{kind.num_ranks} * kind.num_ranks;
    entry->first =
        num_counters_ + wanted <= kNumTrafficCounters ? num_counters_ : -1;
    if (entry->first >= 0) num_counters_ += wanted;
  }
  kinds_[kind] = entry;
  return entry;
}

Tally GpuTraffic::TallyOf(int device, const Entry* entry) {
  if (entry->first < 0 || device < 0 || device >= kMaxDevices) return {};
  unsigned long long* counters = addresses_[device].load();
  if (counters == nullptr) {
    if (TrafficCounters(&counters) != cudaSuccess) {
      (void)cudaGetLastError();  // The call's own launches say what is wrong.
      return {};
    }
    addresses_[device] = counters;
  }
  return {.bytes = counters + entry->first};
}

StatusOr<std::vector<int64_t>> GpuTraffic::Sum() {
  std::vector<int64_t> sum(kNumTrafficCounters);
  std::vector<unsigned long long> here(sum.size());
  const transport::cuda::DeviceGuard guard;
  for (int device = 0; device < kMaxDevices; ++device) {
    const unsigned long long* const counters = addresses_[device].load();
    if (counters == nullptr) continue;
    TB_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device), "cudaSetDevice"));
    TB_RETURN_IF_ERROR(
        FromCuda(cudaDeviceSynchronize(), "the GPU's earlier work"));
    TB_RETURN_IF_ERROR(
        FromCuda(cudaMemcpy(here.data(), counters,
                            here.size() * sizeof(here[0]), cudaMemcpyDefault),
                 "copy of the counters"));
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += static_cast<int64_t>(here[i]);
    }
  }
  return sum;
}

StatusOr<std::vector<Traffic>> GpuTraffic::Read() {
  TB_ASSIGN_OR_RETURN(const std::vector<int64_t> sum, Sum());
  std::map<std::tuple<std::string, Schedule, std::string, int>, Traffic> all;
  const std::lock_guard lock(mutex_);
  for (const auto& [counted, entry] : entries_) {
    const int64_t num_calls = entry.num_calls - entry.num_calls_before;
    if (num_calls == 0) continue;
    if (entry.first < 0) {
      return ResourceExhausted(
          "exchanges differ in more ops, numbers of ranks and paths between "
          "them than " +
          std::to_string(kNumTrafficCounters) + " counters of bytes are for");
    }
    std::map<std::string, std::vector<int64_t>> by_path;
    const int num_ranks = counted.num_ranks;
    for (size_t pair = 0; pair < counted.paths.size(); ++pair) {
      if (counted.paths[pair].empty()) continue;
      std::vector<int64_t>& bytes = by_path[counted.paths[pair]];
      bytes.resize(counted.paths.size());
      const size_t at = entry.first + pair;
      bytes[pair] = sum[at] - (before_.empty() ? 0 : before_[at]);
    }
    for (const auto& [path, bytes] : by_path) {
      Traffic& traffic =
          all[{OpName(counted.op), counted.schedule, path, num_ranks}];
      if (traffic.bytes.empty()) {
        traffic = {OpName(counted.op),
                   counted.schedule,
                   path,
                   num_ranks,
                   0,
                   std::vector<int64_t>(bytes.size())};
      }
      traffic.num_calls += num_calls;
      for (size_t i = 0; i < bytes.size(); ++i) traffic.bytes[i] += bytes[i];
    }
  }
  std::vector<Traffic> list;
  for (const auto& [key, traffic] : all) list.push_back(traffic);
  return list;
}

Status GpuTraffic::Reset() {
  TB_ASSIGN_OR_RETURN(std::vector<int64_t> sum, Sum());
  const std::lock_guard lock(mutex_);
  before_ = std::move(sum);
  for (auto& [counted, entry] : entries_)
    entry.num_calls_before = entry.num_calls;
  return OkStatus();
}

}  // namespace turbobus::moe::cuda

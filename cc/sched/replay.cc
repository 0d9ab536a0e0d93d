#include "sched/replay.h"

#include <algorithm>
#include <deque>
#include <memory>

namespace turbobus::sched {
namespace {

/// A lane's blocks in flight, in the order in which they end.
struct Server {
  struct Pending {
    int64_t end_ns;
    BlockId block;
  };
  std::deque<Pending> pending;
  int64_t free_ns = 0;
  double ns_per_byte = 0;
};

constexpr int64_t kNothing = INT64_MAX;

}  // namespace

StatusOr<ReplayResult> Replay(const Config& config,
                              const std::vector<Transfer>& transfers,
                              int num_concurrent) {
  TB_ASSIGN_OR_RETURN(std::unique_ptr<Scheduler> scheduler,
                      Scheduler::Create(config));
  std::vector<Server> servers(config.lanes.size());
  for (size_t i = 0; i < servers.size(); ++i) {
    servers[i].ns_per_byte = 1e9 / config.lanes[i].path.bandwidth_bytes_per_s;
  }
  // When each server's first block ends, side by side for a quick search.
  std::vector<int64_t> ends(servers.size(), kNothing);
  ReplayResult result;
  int64_t now_ns = 0;
  size_t num_submitted = 0;
  int num_open = 0;
  while (true) {
    while (num_open < num_concurrent && num_submitted < transfers.size()) {
      TB_RETURN_IF_ERROR(scheduler->Submit(transfers[num_submitted++], now_ns));
      ++num_open;
    }
    while (const auto block = scheduler->Next(now_ns)) {
      Server& server = servers[block->lane];
      server.free_ns =
          std::max(server.free_ns, now_ns) +
          static_cast<int64_t>(static_cast<double>(block->size_bytes) *
                               server.ns_per_byte);
      if (server.pending.empty()) ends[block->lane] = server.free_ns;
      server.pending.push_back({server.free_ns, block->id});
      ++result.num_blocks;
    }
    const auto first = std::min_element(ends.begin(), ends.end());
    const auto wakeup_ns = scheduler->NextWakeupNs();
    if (*first == kNothing && !wakeup_ns) break;
    now_ns = std::max(now_ns, std::min(*first, wakeup_ns.value_or(kNothing)));
    if (*first <= now_ns) {
      Server& server = servers[first - ends.begin()];
      const BlockId block = server.pending.front().block;
      server.pending.pop_front();
      *first =
          server.pending.empty() ? kNothing : server.pending.front().end_ns;
      TB_RETURN_IF_ERROR(scheduler->Complete(block, now_ns));
      num_open -= static_cast<int>(scheduler->TakeFinished().size());
    }
  }
  result.end_ns = now_ns;
  return result;
}

}  // namespace turbobus::sched

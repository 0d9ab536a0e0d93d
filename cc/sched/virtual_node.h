#ifndef TURBOBUS_SCHED_VIRTUAL_NODE_H_
#define TURBOBUS_SCHED_VIRTUAL_NODE_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "sched/scheduler.h"

namespace turbobus::sched {

/// One MiB a millisecond: with blocks of 1 MiB, times read as numbers of
/// blocks.
inline constexpr double kMibPerMs = 1048576000.0;
inline constexpr int64_t kMib = 1 << 20;
inline constexpr int64_t kMs = 1'000'000;

/// A node in virtual time for tests: drives a `Scheduler` and plays the links.
/// A GPU's link serves blocks one after the other, whoever they are for.
class VirtualNode {
 public:
  struct Record {
    Block block;
    int64_t issue_ns = 0;
    int64_t end_ns = 0;
    bool is_completed = false;
  };

  explicit VirtualNode(Config config) : config_(std::move(config)) {
    auto created = Scheduler::Create(config_);
    scheduler_ = std::move(created).value();
    slowdown_.assign(config_.lanes.size(), 1.0);
  }

  Scheduler& scheduler() { return *scheduler_; }
  int64_t now_ns() const { return now_ns_; }
  const std::vector<Record>& records() const { return records_; }

  /// Blocks issued on `lane` from now on take this much longer than promised.
  void Slow(int lane, double factor) { slowdown_[lane] = factor; }

  /// Takes a lane's link out: its blocks never end, and the lane is removed.
  void Remove(int lane) {
    std::erase_if(ends_, [&](const auto& end) {
      return records_[end.second].block.lane == lane;
    });
    EXPECT_TRUE(scheduler_->RemoveLane(lane, now_ns_).ok());
    Pump();
  }

  /// These transfers arrive together.
  void Submit(const std::vector<Transfer>& transfers) {
    for (const Transfer& transfer : transfers) {
      EXPECT_EQ(scheduler_->Submit(transfer, now_ns_), OkStatus());
      sizes_[transfer.id] = transfer.size_bytes;
      submit_ns_[transfer.id] = now_ns_;
    }
    Pump();
  }

  void Submit(TransferId id, int gpu, int64_t size_bytes,
              topo::Direction direction = topo::Direction::kH2d) {
    Submit({{.id = id,
             .gpu = gpu,
             .direction = direction,
             .size_bytes = size_bytes}});
  }

  /// Lets time pass until `at_ns`, or (the default) until nothing is left to
  /// do.
  void Run(int64_t at_ns = INT64_MAX) {
    while (true) {
      const auto wakeup = scheduler_->NextWakeupNs();
      int64_t next = ends_.empty() ? INT64_MAX : ends_.begin()->first;
      if (wakeup) next = std::min(next, std::max(*wakeup, now_ns_));
      if (next == INT64_MAX || next > at_ns) break;
      now_ns_ = next;
      while (!ends_.empty() && ends_.begin()->first <= now_ns_) {
        Record& record = records_[ends_.begin()->second];
        ends_.erase(ends_.begin());
        record.is_completed = true;
        EXPECT_EQ(scheduler_->Complete(record.block.id, now_ns_), OkStatus());
      }
      Pump();
    }
    if (at_ns != INT64_MAX) now_ns_ = std::max(now_ns_, at_ns);
  }

  bool has_finished(TransferId id) const { return finish_ns_.contains(id); }
  /// From submission to the last byte.
  int64_t DurationNs(TransferId id) const {
    return finish_ns_.at(id) - submit_ns_.at(id);
  }
  double DurationMs(TransferId id) const {
    return static_cast<double>(DurationNs(id)) / kMs;
  }
  int64_t BytesOn(int lane, TransferId id) const {
    int64_t bytes = 0;
    for (const Record& record : records_) {
      if (record.block.lane == lane && record.block.transfer == id) {
        bytes += record.block.size_bytes;
      }
    }
    return bytes;
  }

  /// Whether completed blocks cover each finished transfer exactly once.
  void ExpectEachByteOnce() const {
    std::map<TransferId, std::map<int64_t, int64_t>> covered;
    for (const Record& record : records_) {
      if (!record.is_completed) continue;
      const Block& block = record.block;
      EXPECT_TRUE(covered[block.transfer]
                      .emplace(block.offset_bytes, block.size_bytes)
                      .second);
    }
    for (const auto& [id, finish_ns] : finish_ns_) {
      int64_t end = 0;
      for (const auto& [offset, size] : covered[id]) {
        EXPECT_EQ(offset, end) << "transfer " << id;
        end = offset + size;
      }
      EXPECT_EQ(end, sizes_.at(id)) << "transfer " << id;
    }
  }

 private:
  void Pump() {
    while (const auto block = scheduler_->Next(now_ns_)) {
      const topo::Path& path = config_.lanes[block->lane].path;
      int64_t& free_ns = link_free_ns_[{path.is_relay() ? path.relay : path.gpu,
                                        path.direction}];
      const int64_t start_ns = std::max(now_ns_, free_ns);
      free_ns =
          start_ns + static_cast<int64_t>(
                         1e9 * static_cast<double>(block->size_bytes) /
                         path.bandwidth_bytes_per_s * slowdown_[block->lane]);
      ends_.emplace(free_ns + path.latency_ns, records_.size());
      records_.push_back({.block = *block,
                          .issue_ns = now_ns_,
                          .end_ns = free_ns + path.latency_ns});
    }
    for (const Finished& finished : scheduler_->TakeFinished()) {
      if (!finished.is_cancelled) finish_ns_[finished.transfer] = now_ns_;
    }
  }

  Config config_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<double> slowdown_;
  int64_t now_ns_ = 0;
  std::set<std::pair<int64_t, size_t>> ends_;
  std::vector<Record> records_;
  std::map<std::pair<int, topo::Direction>, int64_t> link_free_ns_;
  std::map<TransferId, int64_t> sizes_;
  std::map<TransferId, int64_t> submit_ns_;
  std::map<TransferId, int64_t> finish_ns_;
};

/// Lanes for `num_gpus` GPUs that all lend each other their links, in one
/// direction; link i has `rates[i]` MiB/ms. Lane `i * num_gpus + j` belongs to
/// GPU i and uses link j (its direct lane where i = j).
inline Config AllToAll(const std::vector<double>& rates,
                       int64_t block_bytes = kMib,
                       topo::Direction direction = topo::Direction::kH2d) {
  Config config;
  const int num_gpus = static_cast<int>(rates.size());
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    for (int link = 0; link < num_gpus; ++link) {
      LaneSpec& lane = config.lanes.emplace_back();
      lane.path.gpu = gpu;
      lane.path.relay = link == gpu ? topo::kNoRelay : link;
      lane.path.direction = direction;
      lane.path.bandwidth_bytes_per_s = rates[link] * kMibPerMs;
      lane.window_bytes = 2 * block_bytes;
    }
  }
  config.block_bytes = block_bytes;
  config.chunk_bytes = 8 * block_bytes;
  return config;
}

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_VIRTUAL_NODE_H_

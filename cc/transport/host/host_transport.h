#ifndef TURBOBUS_TRANSPORT_HOST_HOST_TRANSPORT_H_
#define TURBOBUS_TRANSPORT_HOST_HOST_TRANSPORT_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transport/host/copy_pool.h"
#include "transport/host/link_emulator.h"
#include "transport/transport.h"

namespace turbobus::transport::host {

/// Lanes of a CPU-only machine: every byte is really copied, by a pool of
/// threads, at the time that a `LinkModel` says (at once for `UnlimitedLinks`).
///
/// `Issue`, `Wait` and `Drop` belong to one thread; everything else, the fault
/// hooks included, may be called by any. No lock is held while bytes are
/// copied.
class HostTransport final : public Transport {
 public:
  /// Lane i runs on `paths[i]` by `links.lanes[i]`. INVALID_ARGUMENT for a
  /// model that contradicts itself or has another number of lanes;
  /// RESOURCE_EXHAUSTED without threads. `num_threads` as for `CopyPool`.
  static StatusOr<std::unique_ptr<HostTransport>> Create(
      std::vector<topo::Path> paths, LinkModel links, int num_threads = 0);

  const std::vector<topo::Path>& paths() const override { return paths_; }
  Status Issue(const BlockCopy& copy) override;
  int Wait(std::span<BlockDone> done, int64_t timeout_ns) override;
  void Drop(uint64_t id) override;
  void Wake() override;
  int64_t NowNs() const override;

  // Fault hooks.

  /// After `skip` more blocks on `lane` (-1: on any), `count` blocks fail with
  /// their bytes half written; `count` 0 takes back what was asked for before.
  void FailBlocks(int lane, int64_t skip, int64_t count);
  /// The lane is gone, in the middle of what it is doing.
  void VanishLane(int lane);
  /// The lane takes `factor` times as long as its slowest link alone; 1 ends
  /// it.
  void SlowLane(int lane, double factor);

  /// Hops that took longer than emulated because this machine did not copy
  /// their bytes in time.
  int64_t num_late_copies() const;
  int num_blocks_in_flight() const;

 private:
  struct Task {
    uint64_t id = 0;
    char* dst = nullptr;
    const char* src = nullptr;
    int64_t size_bytes = 0;
  };
  struct Buffers {
    const void* src = nullptr;
    void* dst = nullptr;
    int64_t size_bytes = 0;
    bool is_to_fail = false;
  };
  struct Fault {
    int lane = 0;
    int64_t skip = 0;
    int64_t count = 0;
  };
  struct Slot {
    std::unique_ptr<std::byte[]> bytes;
    int64_t size_bytes = 0;
  };

  HostTransport(std::vector<topo::Path> paths, LinkModel links);

  // Both need `mutex_`.
  bool ShouldFail(int lane);
  std::vector<Task> TakeTasks();
  Task MakeTask(const LinkEmulator::Copy& copy);

  void Run(std::vector<Task> tasks);
  std::vector<Task> Finish(uint64_t id);
  Slot& SlotOf(const LinkEmulator::Copy& copy);

  const std::vector<topo::Path> paths_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  LinkEmulator emulator_;
  std::unordered_map<uint64_t, Buffers> buffers_;
  std::vector<Fault> faults_;
  std::vector<Slot> slots_;  // [staging][slot]; each belongs to its block
  std::deque<BlockDone> done_;
  bool is_woken_ = false;
  std::unique_ptr<CopyPool> pool_;  // last: its threads use all of the above
};

}  // namespace turbobus::transport::host

#endif  // TURBOBUS_TRANSPORT_HOST_HOST_TRANSPORT_H_

#include "transport/host/host_transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>
#include <optional>
#include <string>
#include <utility>

namespace turbobus::transport::host {
namespace {

using Clock = std::chrono::steady_clock;

// Up to here a copy costs less than handing it to another thread.
constexpr int64_t kInlineBytes = 64 << 10;

Clock::time_point TimePoint(int64_t ns) {
  return Clock::time_point(std::chrono::nanoseconds(ns));
}

}  // namespace

StatusOr<std::unique_ptr<HostTransport>> HostTransport::Create(
    std::vector<topo::Path> paths, LinkModel links, int num_threads) {
  if (paths.size() != links.lanes.size()) {
    return InvalidArgument("links: expected a lane for each of the " +
                           std::to_string(paths.size()) + " paths, got " +
                           std::to_string(links.lanes.size()));
  }
  TB_RETURN_IF_ERROR(links.Validate().WithContext("links"));
  std::unique_ptr<HostTransport> transport(
      new HostTransport(std::move(paths), std::move(links)));
  TB_ASSIGN_OR_RETURN(transport->pool_, CopyPool::Create(num_threads));
  return transport;
}

HostTransport::HostTransport(std::vector<topo::Path> paths, LinkModel links)
    : paths_(std::move(paths)), emulator_(std::move(links)) {
  slots_.resize(static_cast<size_t>(emulator_.model().num_stagings) *
                emulator_.model().num_slots);
}

Status HostTransport::Issue(const BlockCopy& copy) {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    TB_RETURN_IF_ERROR(
        emulator_.Issue(copy.id, copy.lane, copy.size_bytes, NowNs()));
    buffers_[copy.id] = {.src = copy.src,
                         .dst = copy.dst,
                         .size_bytes = copy.size_bytes,
                         .is_to_fail = ShouldFail(copy.lane)};
    tasks = TakeTasks();
  }
  Run(std::move(tasks));
  return OkStatus();
}

int HostTransport::Wait(std::span<BlockDone> done, int64_t timeout_ns) {
  const int64_t give_up_ns = timeout_ns < 0 ? -1 : NowNs() + timeout_ns;
  std::unique_lock lock(mutex_);
  while (true) {
    const int64_t now_ns = NowNs();
    emulator_.Advance(now_ns);
    if (std::vector<Task> tasks = TakeTasks(); !tasks.empty()) {
      lock.unlock();
      Run(std::move(tasks));
      lock.lock();
      continue;
    }
    if (!done_.empty() || is_woken_) break;
    if (give_up_ns >= 0 && now_ns >= give_up_ns) break;
    std::optional<int64_t> until_ns = emulator_.NextEventNs();
    if (give_up_ns >= 0) {
      until_ns = until_ns ? std::min(*until_ns, give_up_ns) : give_up_ns;
    }
    if (until_ns) {
      changed_.wait_until(lock, TimePoint(*until_ns));
    } else {
      changed_.wait(lock);
    }
  }
  is_woken_ = false;
  int num_done = 0;
  for (BlockDone& entry : done) {
    if (done_.empty()) break;
    entry = std::move(done_.front());
    done_.pop_front();
    ++num_done;
  }
  return num_done;
}

void HostTransport::Drop(uint64_t id) {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    emulator_.Abort(id, Cancelled("dropped"), NowNs());
    tasks = TakeTasks();
  }
  Run(std::move(tasks));
}

void HostTransport::Wake() {
  {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
  }
  changed_.notify_one();
}

int64_t HostTransport::NowNs() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             Clock::now().time_since_epoch())
      .count();
}

void HostTransport::FailBlocks(int lane, int64_t skip, int64_t count) {
  const std::lock_guard lock(mutex_);
  if (count <= 0) {
    faults_.clear();
  } else {
    faults_.push_back({.lane = lane, .skip = skip, .count = count});
  }
}

void HostTransport::VanishLane(int lane) {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    emulator_.RemoveLane(
        lane, Unavailable("lane " + std::to_string(lane) + " has vanished"),
        NowNs());
    tasks = TakeTasks();
  }
  changed_.notify_one();
  Run(std::move(tasks));
}

void HostTransport::SlowLane(int lane, double factor) {
  {
    const std::lock_guard lock(mutex_);
    emulator_.SlowLane(lane, factor, NowNs());
  }
  changed_.notify_one();
}

int64_t HostTransport::num_late_copies() const {
  const std::lock_guard lock(mutex_);
  return emulator_.num_late_copies();
}

int HostTransport::num_blocks_in_flight() const {
  const std::lock_guard lock(mutex_);
  return emulator_.num_blocks();
}

bool HostTransport::ShouldFail(int lane) {
  bool should_fail = false;
  for (Fault& fault : faults_) {
    if (fault.lane != -1 && fault.lane != lane) continue;
    if (fault.skip > 0) {
      --fault.skip;
    } else if (fault.count > 0) {
      --fault.count;
      should_fail = true;
    }
  }
  std::erase_if(faults_, [](const Fault& fault) { return fault.count <= 0; });
  return should_fail;
}

std::vector<HostTransport::Task> HostTransport::TakeTasks() {
  std::vector<Task> tasks;
  // A task that cannot be made ends its block, and that may start others.
  while (true) {
    const std::vector<LinkEmulator::Copy> copies = emulator_.TakeCopies();
    if (copies.empty()) break;
    for (const LinkEmulator::Copy& copy : copies)
      tasks.push_back(MakeTask(copy));
  }
  for (BlockDone& done : emulator_.TakeDone()) {
    buffers_.erase(done.id);
    done_.push_back(std::move(done));
  }
  return tasks;
}

HostTransport::Task HostTransport::MakeTask(const LinkEmulator::Copy& copy) {
  const Buffers& buffers = buffers_.at(copy.id);
  Task task{.id = copy.id,
            .dst = static_cast<char*>(buffers.dst),
            .src = static_cast<const char*>(buffers.src),
            .size_bytes = buffers.size_bytes};
  if (copy.slot >= 0) {
    Slot& slot = SlotOf(copy);
    if (slot.size_bytes < buffers.size_bytes) {
      slot.bytes.reset(new (std::nothrow) std::byte[buffers.size_bytes]);
      slot.size_bytes = slot.bytes ? buffers.size_bytes : 0;
    }
    auto* const staged = reinterpret_cast<char*>(slot.bytes.get());
    if (copy.hop == 0) {
      task.dst = staged;
    } else {
      task.src = staged;
    }
    if (staged == nullptr && buffers.size_bytes > 0) {
      emulator_.Abort(
          copy.id,
          ResourceExhausted("no memory for a staging buffer of " +
                            std::to_string(buffers.size_bytes) + " bytes"),
          NowNs());
      task.size_bytes = 0;
    }
  }
  const bool is_last_hop =
      copy.hop + 1 == std::ssize(emulator_.model().lanes[copy.lane].hops);
  if (buffers.is_to_fail && is_last_hop) {
    task.size_bytes /= 2;
    emulator_.Abort(copy.id, Internal("injected fault"), NowNs());
  }
  return task;
}

void HostTransport::Run(std::vector<Task> tasks) {
  // Small copies end here, and may bring new ones.
  while (!tasks.empty()) {
    std::vector<Task> next;
    for (const Task& task : tasks) {
      if (task.size_bytes > kInlineBytes) {
        pool_->Copy(task.dst, task.src, task.size_bytes,
                    [this, id = task.id] { Run(Finish(id)); });
        continue;
      }
      if (task.size_bytes > 0) std::memcpy(task.dst, task.src, task.size_bytes);
      std::ranges::move(Finish(task.id), std::back_inserter(next));
    }
    tasks = std::move(next);
  }
}

std::vector<HostTransport::Task> HostTransport::Finish(uint64_t id) {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    emulator_.CopyDone(id, NowNs());
    tasks = TakeTasks();
  }
  changed_.notify_one();
  return tasks;
}

HostTransport::Slot& HostTransport::SlotOf(const LinkEmulator::Copy& copy) {
  const int staging = emulator_.model().lanes[copy.lane].staging;
  return slots_[staging * emulator_.model().num_slots + copy.slot];
}

}  // namespace turbobus::transport::host

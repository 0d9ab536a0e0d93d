#ifndef TURBOBUS_ENGINE_FAKE_STREAMS_H_
#define TURBOBUS_ENGINE_FAKE_STREAMS_H_

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/streams.h"

namespace turbobus::engine {

/// Streams without a machine, for tests: work happens when `Step` or `Drain` is
/// called, in any order that streams and events allow, drawn from a seed. What
/// an engine forgot to order comes out wrong for some seed.
class FakeStreams : public transport::Streams {
 public:
  using Stream = transport::Stream;
  using Event = transport::Event;

  FakeStreams(int num_gpus, uint64_t seed)
      : num_gpus_(num_gpus), random_(seed) {}

  // What tests set up and look at.
  std::set<std::pair<int, int>> no_peer_access;  // (relay, gpu)
  std::set<int> other_lenders;
  std::set<int> no_memory;
  std::set<const void*> unreachable;  // device pointers
  std::set<const void*> device;       // pointers that are device memory
  std::set<const void*> pageable;
  Status copy_error;  // of every later copy
  /// What each GPU copies; GPUs have clocks of their own.
  std::map<int, int64_t> bytes_per_ns;
  /// What each of a GPU's copies waits for a stranger's first.
  std::map<int, int64_t> stalls_ns;
  std::atomic<int> num_copies = 0;
  std::atomic<int> num_yields = 0;

  /// Does one thing that can be done, if there is one.
  bool Step() {
    const std::lock_guard lock(mutex_);
    std::vector<StreamState*> ready;
    for (const auto& stream : streams_) {
      if (!stream->work.empty() && stream->work.front().is_ready()) {
        ready.push_back(stream.get());
      }
    }
    if (ready.empty()) return false;
    StreamState& stream = *ready[random_() % ready.size()];
    const Work work = std::move(stream.work.front());
    stream.work.pop_front();
    now_ns_ += 100;
    work.run();
    for (const auto& [gpu, time_ns] : time_ns_) {
      now_ns_ = std::max(now_ns_, time_ns);
    }
    return true;
  }
  /// Lets time pass in which nothing happens.
  void Sleep(int64_t time_ns) {
    const std::lock_guard lock(mutex_);
    now_ns_ += time_ns;
    for (int gpu = 0; gpu < num_gpus_; ++gpu) time_ns_[gpu] += time_ns;
  }
  /// Does all that can be done; whether nothing is left.
  bool Drain() {
    while (Step()) {
    }
    const std::lock_guard lock(mutex_);
    return std::ranges::all_of(
        streams_, [](const auto& stream) { return stream->work.empty(); });
  }
  /// Work of a program itself.
  void Enqueue(
      Stream stream, std::function<void()> run,
      std::function<bool()> is_ready = [] { return true; }) {
    const std::lock_guard lock(mutex_);
    Push(stream, std::move(run), std::move(is_ready));
  }

  int num_gpus() const override { return num_gpus_; }
  int64_t NowNs() const override {
    const std::lock_guard lock(mutex_);
    return now_ns_;
  }

  StatusOr<Stream> CreateStream(int gpu) override {
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::make_unique<StreamState>());
    streams_.back()->gpu = gpu;
    return Stream{streams_.back().get()};
  }
  StatusOr<Event> CreateEvent(int gpu, bool is_timed) override {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::make_unique<EventState>());
    events_.back()->gpu = gpu;
    events_.back()->is_timed = is_timed;
    return Event{events_.back().get()};
  }
  StatusOr<void*> AllocateDevice(int gpu, int64_t size_bytes) override {
    if (no_memory.contains(gpu)) {
      return ResourceExhausted("GPU " + std::to_string(gpu) +
                               " has no memory left for staging");
    }
    return Allocate(size_bytes);
  }
  StatusOr<void*> AllocatePinnedHost(int64_t size_bytes) override {
    return Allocate(size_bytes);
  }
  void Free(void* memory) override {
    const std::lock_guard lock(mutex_);
    std::erase_if(memory_,
                  [memory](const auto& m) { return m.get() == memory; });
  }
  Status EnablePeerAccess(int relay, int gpu) override {
    if (!no_peer_access.contains({relay, gpu})) return OkStatus();
    return Unavailable("no peer access");
  }
  Status LockLender(int gpu) override {
    if (!other_lenders.contains(gpu)) return OkStatus();
    return Unavailable("another process lends this GPU's link");
  }

  Status Record(int gpu, Event event, Stream stream) override {
    const std::lock_guard lock(mutex_);
    auto* const state = static_cast<EventState*>(event);
    if (state->gpu != gpu || Of(stream)->gpu != gpu) {
      return Internal("event and stream of different GPUs");
    }
    const int64_t version = ++state->recorded;
    Push(stream, [this, gpu, state, version] {
      state->happened = version;
      state->time_ns = time_ns_[gpu];
    });
    return OkStatus();
  }
  Status Wait(Stream stream, Event event) override {
    const std::lock_guard lock(mutex_);
    auto* const state = static_cast<EventState*>(event);
    if (state->recorded == 0)
      return Internal("wait for an event never recorded");
    const int64_t version = state->recorded;
    Push(
        stream,
        [this, state, gpu = Of(stream)->gpu] {
          time_ns_[gpu] = std::max(time_ns_[gpu], state->time_ns);
        },
        [state, version] { return state->happened >= version; });
    return OkStatus();
  }
  using transport::Streams::Copy;
  Status Copy(Stream stream, void* dst, const void* src, int64_t size_bytes,
              transport::CopyKind) override {
    const std::lock_guard lock(mutex_);
    if (!copy_error.ok()) return copy_error;
    ++num_copies;
    Push(stream, [this, gpu = Of(stream)->gpu, dst, src, size_bytes] {
      const auto rate = bytes_per_ns.find(gpu);
      time_ns_[gpu] +=
          stalls_ns[gpu] +
          size_bytes / (rate == bytes_per_ns.end() ? 50 : rate->second);
      std::memcpy(dst, src, static_cast<size_t>(size_bytes));
    });
    return OkStatus();
  }
  Status Yield(int gpu, Stream stream) override {
    const std::lock_guard lock(mutex_);
    if (Of(stream)->gpu != gpu) return Internal("a yield on another GPU");
    ++num_yields;
    return OkStatus();
  }
  Status CopyRow(int gpu, Stream stream,
                 const transport::RowCopy& copy) override {
    const std::lock_guard lock(mutex_);
    if (Of(stream)->gpu != gpu) return Internal("a kernel on another GPU");
    Push(stream, [copy] {
      const int32_t index = std::clamp(*copy.index, 0, copy.num_rows - 1);
      if (copy.seen != nullptr) *copy.seen = index + 1;
      if (index == copy.skip_index) return;
      for (int64_t i = copy.begin_bytes; i < copy.end_bytes; ++i) {
        std::byte* const in_stack = copy.stack + index * copy.piece_bytes +
                                    i / copy.piece_bytes * copy.stride_bytes +
                                    i % copy.piece_bytes;
        (copy.is_store ? *in_stack : copy.row[i]) =
            copy.is_store ? copy.row[i] : *in_stack;
      }
    });
    return OkStatus();
  }

  StatusOr<bool> IsDone(Event event) override {
    const std::lock_guard lock(mutex_);
    const auto* const state = static_cast<EventState*>(event);
    return state->happened == state->recorded;
  }
  StatusOr<int64_t> ElapsedNs(Event from, Event to) override {
    const std::lock_guard lock(mutex_);
    const auto* const a = static_cast<EventState*>(from);
    const auto* const b = static_cast<EventState*>(to);
    if (!a->is_timed || !b->is_timed || a->gpu != b->gpu) {
      return Internal("these events cannot be compared");
    }
    // As CUDA has it: milliseconds, as a float.
    const auto milliseconds =
        static_cast<float>(static_cast<double>(b->time_ns - a->time_ns) / 1e6);
    return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
  }
  transport::MemoryKind KindOf(const void* pointer) override {
    if (device.contains(pointer)) return transport::MemoryKind::kDevice;
    if (pageable.contains(pointer)) return transport::MemoryKind::kPageableHost;
    return transport::MemoryKind::kPinnedHost;
  }
  Status CheckPeerAccess(int, const void* device_pointer) override {
    if (!unreachable.contains(device_pointer)) return OkStatus();
    return Unavailable("the relay cannot reach this memory");
  }

 private:
  struct Work {
    std::function<void()> run;
    std::function<bool()> is_ready;
  };
  struct StreamState {
    int gpu = 0;
    std::deque<Work> work;
  };
  struct EventState {
    int gpu = 0;
    bool is_timed = false;
    int64_t recorded = 0;
    int64_t happened = 0;
    int64_t time_ns = 0;
  };

  static StreamState* Of(Stream stream) {
    return static_cast<StreamState*>(stream);
  }
  void Push(
      Stream stream, std::function<void()> run,
      std::function<bool()> is_ready = [] { return true; }) {
    Of(stream)->work.push_back({std::move(run), std::move(is_ready)});
  }
  void* Allocate(int64_t size_bytes) {
    const std::lock_guard lock(mutex_);
    memory_.push_back(
        std::make_unique<std::byte[]>(static_cast<size_t>(size_bytes)));
    return memory_.back().get();
  }

  const int num_gpus_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  int64_t now_ns_ = 1;
  std::map<int, int64_t> time_ns_;  // of each GPU's clock
  std::vector<std::unique_ptr<StreamState>> streams_;
  std::vector<std::unique_ptr<EventState>> events_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_FAKE_STREAMS_H_

#ifndef TURBOBUS_MOE_CUDA_SIDE_STREAMS_H_
#define TURBOBUS_MOE_CUDA_SIDE_STREAMS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "moe/cuda/events.h"

namespace turbobus::moe::cuda {

/// Exchanges that run beside a program's compute: each is enqueued on a stream
/// of ours, which waits for what the program has enqueued so far, and later the
/// program's stream waits for it: at the latest when its run is over, however
/// it ends.
///
/// Thread-safe; the current device must be the program's. No lock is held while
/// an exchange is enqueued (it meets other ranks).
class SideStreams {
 public:
  /// A program that is being enqueued on a device: one run of it.
  struct Program {
    int device = 0;
    int64_t run_id = 0;
    cudaStream_t stream = nullptr;
  };

  /// A stream and its scratch memory, lent to one call at a time. Calls that
  /// follow each other on it use the same memory: the stream keeps them in
  /// order.
  class Lane {
   public:
    static StatusOr<std::unique_ptr<Lane>> Create();

    cudaStream_t stream() const { return stream_; }

    /// Device memory that is this call's until the stream has passed it.
    StatusOr<void*> Allocate(int64_t size_bytes);

   private:
    friend class SideStreams;
    explicit Lane(cudaStream_t stream) : stream_(stream) {}

    cudaStream_t stream_;
    uint8_t* block_ = nullptr;
    int64_t block_bytes_ = 0;
    int64_t used_bytes_ = 0;
  };

  /// Two lanes are enough for `expert_parallel`: a dispatch and a combine are
  /// under way at once.
  static SideStreams& Process();

  explicit SideStreams(int lanes_a_device = 2)
      : lanes_a_device_(lanes_a_device) {}

  /// Enqueues an exchange by `enqueue`, which gets its lane, or the reason why
  /// there is none: it is called once in any case, since other ranks may wait
  /// for what it says. `results` tell the exchange from others until `Join`.
  /// Whatever was enqueued is under way, also if this fails.
  Status Run(const Program& program, const std::vector<const void*>& results,
             const std::function<Status(const StatusOr<Lane*>&)>& enqueue);

  /// Makes the program's stream wait for the exchange that has these results.
  /// FAILED_PRECONDITION if there is none under way.
  Status Join(const Program& program, const std::vector<const void*>& results);

  /// Makes the program's stream wait for all that nobody has joined. Its run is
  /// over: if some other op has failed, its buffers are soon another's.
  void Leave(const Program& program);

  /// Exchanges that have been started and neither joined nor left.
  int64_t num_under_way();

 private:
  struct UnderWay {
    Program program;
    std::vector<const void*> results;
    SharedEvent end;

    bool IsOf(const Program& run) const {
      return program.device == run.device && program.run_id == run.run_id;
    }
  };

  /// An exchange that is about to be enqueued.
  struct Start {
    std::unique_ptr<Lane> lane;
    SharedEvent end;
  };

  StatusOr<std::unique_ptr<Lane>> TakeLane(int device);
  /// A lane whose stream waits for the program's.
  StatusOr<Start> Prepare(const Program& program);

  const int lanes_a_device_;
  std::mutex mutex_;
  // All guarded by mutex_. Lanes by device, the one used longest ago first.
  std::map<int, std::deque<std::unique_ptr<Lane>>> free_;
  std::map<int, int> num_lanes_;
  std::deque<UnderWay> under_way_;  // Oldest first.
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_SIDE_STREAMS_H_

#ifndef TURBOBUS_MOE_CUDA_VISIT_H_
#define TURBOBUS_MOE_CUDA_VISIT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "base/status.h"
#include "moe/blocking_meeting.h"
#include "moe/cuda/events.h"
#include "moe/cuda/gpu_exchange.h"
#include "moe/cuda/kernels.h"

namespace turbobus::moe::cuda {

/// One rank's way through the meetings of a call. For one host thread, with the
/// caller's device current; `caller` must outlive it. Whatever fails here fails
/// the other ranks of the call too.
class Visit {
 public:
  explicit Visit(const Caller& caller) : caller_(caller) {}
  /// If the call has failed after its first meeting and before its last one,
  /// others may have enqueued what writes into this rank's memory: makes the
  /// stream wait for it. Blocks until they have said so, or their time is over.
  ~Visit();
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  /// Tells the others that all before this is enqueued here, and makes the
  /// stream wait until it is done everywhere. `addresses` are swapped. Blocks
  /// until all ranks have come, or its time is over.
  Status Meet(std::initializer_list<const void*> addresses = {});

  /// The same with values of any meaning, and what has to live until the visits
  /// of all ranks are over.
  Status MeetWith(std::vector<uint64_t> values, std::shared_ptr<void> keep);

  /// The same, after which no rank touches another's memory.
  Status MeetLast(std::vector<uint64_t> values = {},
                  std::shared_ptr<void> keep = nullptr);

  /// Value number `index` of a rank, from the last meeting that swapped some.
  uint64_t Value(int rank, int index) const {
    return (*records_)[rank].values[index];
  }

  /// What a rank recorded just before that meeting.
  cudaEvent_t EventOf(int rank) const {
    return reinterpret_cast<cudaEvent_t>((*records_)[rank].values.back());
  }

  /// An event here on the caller's stream.
  StatusOr<SharedEvent> Mark();

  /// Blocks until the GPU has come to `mark`, the call has failed elsewhere, or
  /// its time is over.
  Status AwaitOnHost(const SharedEvent& mark);

  /// Address number `index` of every rank.
  template <typename T>
  Peers<T> Addresses(int index) const {
    Peers<T> peers;
    for (int r = 0; r < caller_.num_ranks; ++r) {
      peers.of[r] = reinterpret_cast<T*>((*records_)[r].values[index]);
    }
    return peers;
  }

  /// Tells who measures that a step is over.
  void Step(const char* name) const {
    if (caller_.on_step) caller_.on_step(name);
  }

  /// Passes a launch's error on to the ranks that wait for this one.
  Status Check(cudaError_t error, const char* what);

  /// The same for any other reason not to go on.
  Status Check(const Status& status);

 private:
  BlockingMeeting::Rank Who() const;
  Status Try(std::vector<uint64_t> values, std::shared_ptr<void> keep);
  Status TryAwaitOnHost(const SharedEvent& mark);
  void Part();

  const Caller& caller_;
  int phase_ = 0;
  bool is_last_ = false;     // The meeting that comes or has come.
  bool is_between_ = false;  // After the first meeting, before the last.
  bool has_failed_ = false;
  BlockingMeeting::Records records_;
  // Of all meetings: what they keep is in use until the end.
  std::vector<BlockingMeeting::Records> all_records_;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_VISIT_H_

#ifndef TURBOBUS_ENGINE_STREAM_ENGINE_H_
#define TURBOBUS_ENGINE_STREAM_ENGINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/flight.h"
#include "engine/index_predictor.h"
#include "engine/lane_health.h"
#include "engine/live_page.h"
#include "engine/stream_issue.h"
#include "engine/stream_lanes.h"
#include "engine/stream_settings.h"
#include "sched/split.h"
#include "topo/path.h"
#include "transport/streams.h"

namespace turbobus::engine {

struct CopyRequest {
  /// The FFI target, for messages and traces.
  std::string_view call;
  int gpu = 0;
  topo::Direction direction = topo::Direction::kH2d;
  /// XLA's stream: the copy waits for what is on it.
  transport::Stream stream = nullptr;
  int64_t run = 0;
  const void* src = nullptr;
  void* dst = nullptr;
  int64_t size_bytes = 0;
};

struct RowRequest {
  std::string_view call;
  int gpu = 0;
  transport::Stream stream = nullptr;
  int64_t run = 0;
  /// begin, end, skip and seen are the engine's to fill.
  transport::RowCopy row;
};

struct DoneRequest {
  std::string_view call;
  int gpu = 0;
  transport::Stream stream = nullptr;
  int64_t run = 0;
  /// What the start wrote to.
  const void* buffer = nullptr;
};

/// A run of a program that is over on a GPU: all of it is on `stream`, or one
/// of its calls has failed.
struct LeaveRequest {
  int gpu = 0;
  transport::Stream stream = nullptr;
  int64_t run = 0;
};

/// Pooled transfers for machines whose copies run on streams: every call issues
/// all its copies at once, ordered by events, and returns. There is no control
/// thread, nobody waits for the device, and an idle engine costs nothing.
///
/// Where a transfer's blocks go is decided from what is already issued and not
/// over, the rates of the paths, and how late relays were last time
/// (docs/gpu_offload.md). The same decisions are taken by `sched::Scheduler`
/// where they can be taken later.
///
/// Thread-safe. Calls that put work on one XLA stream must be ordered by the
/// caller, as XLA does. The mutex is never held over a call that puts work on a
/// stream, because such a call blocks while the stream's queue is full.
/// Buffers belong to the caller; with events between, they are safe to reuse in
/// stream order once `Copy`, `Done` or `Leave` has returned.
class StreamEngine {
 public:
  /// `paths[i]` is path i of the statistics; each GPU needs a direct path in
  /// both directions. Makes every stream and all staging memory, so it may wait
  /// for the device.
  static StatusOr<std::unique_ptr<StreamEngine>> Create(
      std::unique_ptr<transport::Streams> streams,
      std::vector<topo::Path> paths, const StreamSettings& settings);

  /// After it, `stream` goes on when the bytes are in place.
  Status Copy(const CopyRequest& request);
  /// The bytes are in flight until `Done`, or else until `Leave`.
  Status Start(const CopyRequest& request);
  Status CopyRow(const RowRequest& request);
  Status StartRow(const RowRequest& request);
  /// FAILED_PRECONDITION if this run has nothing in flight into the buffer.
  Status Done(const DoneRequest& request);
  /// Makes `stream` wait for whatever the run has started and not done, and
  /// forgets it: the buffers are about to become another's. Costs a look at a
  /// counter if no run on the GPU has anything in flight.
  void Leave(const LeaveRequest& request);

  StreamSettings settings() const;
  /// INVALID_ARGUMENT as `Validate` has it; holds for later transfers.
  Status SetSettings(const StreamSettings& settings);
  /// New rates for the paths, in their order.
  Status SetRates(const std::vector<double>& bandwidth_bytes_per_s);

  StreamStats stats();
  /// Spans since the last call, if traced; call when the transfers are over.
  std::vector<StreamSpan> TakeSpans();
  /// Why relays were dropped or devices failed, since the last call.
  std::vector<std::string> TakeMessages();
  std::vector<TransferRecord> recent_transfers();

  /// Gets each message as it comes up, under the mutex: it must not call back.
  void SetLog(std::function<void(const std::string&)> log);

  /// Bytes per second of each of `paths` (indices) when all of them copy
  /// `size_bytes` at once; the engine must be idle. Waits for the copies: not
  /// for handlers.
  StatusOr<std::vector<double>> Measure(const std::vector<int>& paths,
                                        int64_t size_bytes,
                                        int64_t block_bytes);

  /// Makes the next copies over `relay` fail as they are issued.
  void InjectFault(int relay);

  /// Lets other processes look on, as long as the engine lives, which is as
  /// long as the process; call before the first transfer. UNAVAILABLE if that
  /// cannot be; transfers do without.
  Status Publish();

  transport::Streams& streams() { return *streams_; }

 private:
  /// Where a row's bytes are copied by cores: some by the GPU itself on
  /// `direct` (null: on XLA's stream), some by relays.
  struct RowPlan {
    FlightPtr flight;
    DirectLane* direct = nullptr;
    int64_t direct_bytes = 0;
    std::vector<std::pair<RowLane*, int64_t>> relays;
    /// Where the relays read the row's number.
    int32_t* index = nullptr;
  };
  /// What of ours is under way on a link.
  struct Load {
    int64_t fifo_bytes = 0;
    int64_t shared_bytes = 0;
  };
  /// The guesses for one stack.
  struct Guesses {
    IndexPredictor predictor;
    std::deque<int32_t*> seen;
    int64_t last_used = 0;
  };
  using Span = std::pair<const std::byte*, int64_t>;

  StreamEngine(std::unique_ptr<transport::Streams> streams,
               std::vector<topo::Path> paths, const StreamSettings& settings,
               StreamLanes lanes);
  Status SetUp(std::vector<std::string> dropped);

  // stream_engine.cc: without the mutex.
  Status Plain(const CopyRequest& request);
  /// With the mutex: a copy on XLA's own stream.
  void BookPlain(int gpu, topo::Direction direction, int64_t size_bytes,
                 const Status& status);
  Status Launch(const CopyRequest& request, bool is_start,
                const transport::RowCopy* fix);
  Status Join(const FlightPtr& flight, transport::Stream stream);
  void AddStarted(int gpu, const void* buffer, const FlightPtr& flight);
  /// Null if there is none. Held until `Release`, as those of `TakeRun`.
  FlightPtr TakeStarted(const DoneRequest& request);
  std::vector<FlightPtr> TakeRun(const LeaveRequest& request);
  void Release(Flight& flight, transport::Stream joined);
  Status OrderBehind(int gpu, transport::Stream stream, Span read,
                     Span written);

  // stream_rows.cc: without the mutex.
  Status CheckRow(const RowRequest& request);
  Status LaunchRow(const RowRequest& request, bool is_start);
  Status IssueRow(const RowRequest& request, RowPlan& plan);

  // stream_rows.cc: with the mutex.
  Status PlanRow(const RowRequest& request, bool is_start, RowPlan& plan);
  Guesses& GuessesFor(const RowRequest& request);
  void ForgetOldestStack();
  void ReadSeen(Guesses& guesses);

  // stream_plan.cc: with the mutex.
  Status PlanCopy(const CopyRequest& request, bool is_start, IssuePlan& plan);
  StatusOr<FlightPtr> NewFlight(std::string_view call, int gpu,
                                topo::Direction direction,
                                transport::Stream stream, int64_t run);
  /// Of a transfer that went over XLA's own stream: there is nothing to wait
  /// for.
  FlightPtr NewLanded(std::string_view call, int gpu, topo::Direction direction,
                      transport::Stream stream, int64_t run);
  Status AddUse(Flight& flight, int path, const void* lane, int64_t bytes);
  std::vector<int> UsableRelays(int gpu, topo::Direction direction,
                                const void* device_pointer);
  sched::SplitLane LaneFor(int path, const void* lane,
                           transport::Stream stream);
  std::vector<int64_t> Share(const std::vector<int>& paths,
                             const std::vector<sched::SplitLane>& lanes,
                             int64_t size_bytes) const;
  Load LoadOn(int link_gpu, topo::Direction direction, const void* lane,
              transport::Stream stream);
  void MarkContended(Flight& flight);
  int PathIndex(int gpu, int relay, topo::Direction direction) const;
  int LinkGpu(int path) const;
  int32_t* NextWord();

  // stream_poll.cc: with the mutex.
  void Poll();
  void Finish(const FlightPtr& flight);
  void Judge(const Flight& flight);
  void Book(const Flight& flight, const TransferRecord& record);
  double DirectSlowdown(const Flight& flight);
  double OverlapWith(int gpu, const TransferRecord& record);
  int64_t TimeOf(int gpu, transport::Event event);
  void AddSpans(const Flight& flight);
  void AddBlockSpans(
      const LaneUse& use,
      const std::function<void(const LaneUse&, StreamSpan)>& add);
  TransferRecord RecordOf(const Flight& flight);
  StatusOr<transport::Event> TakeEvent(int gpu, bool is_timed);
  void DropPath(int path, const std::string& reason);
  void Say(std::string message);
  void SetEpochs();
  void RenewEpochs();

  // stream_live.cc: what others see. With the mutex.
  /// Bytes on XLA's own stream count when they are enqueued.
  void CountPlain(int gpu, topo::Direction direction, int64_t bytes);
  void CountIssued(const Flight& flight);
  void CountOver(const Flight& flight);
  void ShowState(int path);

  const std::unique_ptr<transport::Streams> streams_;
  /// Rows: the paths, then for each GPU and direction what goes over XLA's own
  /// stream. Null: not published.
  std::unique_ptr<LivePage> live_;

  mutable std::mutex mutex_;
  std::vector<topo::Path> paths_;
  StreamSettings settings_;
  StreamLanes lanes_;
  std::vector<LaneHealth> health_;  // by path
  std::vector<Rivalry> rivals_;     // by path
  std::vector<LoanBook> loans_;     // by path
  StreamStats stats_;
  std::vector<std::string> messages_;
  std::function<void(const std::string&)> log_;
  int64_t next_id_ = 1;
  std::deque<FlightPtr> flights_;  // issued or being issued, oldest first
  /// Started and not done, by (gpu, address), oldest first: several rows of one
  /// stack may be on their way.
  std::map<std::pair<int, const void*>, std::deque<FlightPtr>> in_flight_;
  /// Those in `in_flight_` by GPU; read without the mutex.
  std::vector<std::atomic<int64_t>> num_started_;
  std::map<std::pair<int, bool>, std::vector<transport::Event>> events_;
  std::map<std::tuple<int, const void*, int32_t, int64_t>, Guesses> guesses_;
  int64_t num_guesses_ = 0;
  /// Pinned: where kernels say which rows they found, and where relays read a
  /// row's number (they may not reach the program's).
  int32_t* words_ = nullptr;
  size_t next_word_ = 0;
  Status device_error_;
  std::set<int> faults_;
  std::deque<int64_t> handler_ns_;

  /// Where a GPU's clock is on ours: an event and when it was recorded. A newer
  /// one takes over now and then, because CUDA tells times apart by a float: an
  /// hour from the event its steps are a quarter of a millisecond.
  struct Epoch {
    transport::Stream stream = nullptr;
    transport::Event event = nullptr;
    int64_t time_ns = 0;
    transport::Event next = nullptr;
    /// 0: `next` has not been recorded.
    int64_t next_time_ns = 0;
  };
  std::map<int, Epoch> epochs_;
  std::deque<StreamSpan> spans_;
  std::deque<TransferRecord> recent_;
};

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_STREAM_ENGINE_H_

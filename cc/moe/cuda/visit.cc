#include "moe/cuda/visit.h"

#include <sys/prctl.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "moe/cuda/events.h"

namespace turbobus::moe::cuda {
namespace {

/// What a plan kernel takes is awaited awake; what came before it, asleep.
constexpr std::chrono::microseconds kYieldFor{200};
constexpr std::chrono::microseconds kSleep{20};

/// While it lives, sleeps of this thread end on time: Linux lets them take 50
/// µs longer otherwise, to wake threads together.
class PunctualSleeps {
 public:
  PunctualSleeps() : slack_ns_(prctl(PR_GET_TIMERSLACK)) {
    (void)prctl(PR_SET_TIMERSLACK, 1UL);
  }
  ~PunctualSleeps() {
    if (slack_ns_ > 0) {
      (void)prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_ns_));
    }
  }
  PunctualSleeps(const PunctualSleeps&) = delete;
  PunctualSleeps& operator=(const PunctualSleeps&) = delete;

 private:
  const int slack_ns_;
};

}  // namespace

Visit::~Visit() {
  if (has_failed_ && is_between_) Part();
}

/// A meeting of its own, since that of the call fails for everybody. Ranks come
/// to it as soon as they hear of the failure; who has passed the last meeting
/// has no peer that can still fail between.
void Visit::Part() {
  CallKey key = caller_.key;
  key.group = -1 - key.group;  // No call's.
  BlockingMeeting::Record record;
  // A rank without an event has lost its device, which does nothing any more.
  const auto event =
      EventPool::Process().Record(caller_.device, caller_.stream);
  record.values = {event.ok() ? reinterpret_cast<uint64_t>(event->get()) : 0};
  if (event.ok()) record.keep = *event;
  const auto records = caller_.meeting->Meet(key, 0, Who(), std::move(record));
  if (!records.ok()) return;
  for (const BlockingMeeting::Record& peer : **records) {
    auto* const end = reinterpret_cast<cudaEvent_t>(peer.values[0]);
    if (end != nullptr) (void)cudaStreamWaitEvent(caller_.stream, end, 0);
  }
}

Status Visit::Meet(std::initializer_list<const void*> addresses) {
  std::vector<uint64_t> values;
  values.reserve(addresses.size() + 1);  // The event's, too.
  for (const void* address : addresses) {
    values.push_back(reinterpret_cast<uint64_t>(address));
  }
  return MeetWith(std::move(values), nullptr);
}

Status Visit::MeetWith(std::vector<uint64_t> values,
                       std::shared_ptr<void> keep) {
  Step("enqueued");
  const Status status = Check(Try(std::move(values), std::move(keep)));
  Step("met");
  return status;
}

Status Visit::MeetLast(std::vector<uint64_t> values,
                       std::shared_ptr<void> keep) {
  is_last_ = true;
  return MeetWith(std::move(values), std::move(keep));
}

StatusOr<SharedEvent> Visit::Mark() {
  auto event = EventPool::Process().Record(caller_.device, caller_.stream);
  if (!event.ok()) return Check(event.status());
  return event;
}

Status Visit::AwaitOnHost(const SharedEvent& mark) {
  Step("enqueued");
  const Status status = Check(TryAwaitOnHost(mark));
  Step("counted");
  return status;
}

Status Visit::Check(cudaError_t error, const char* what) {
  return Check(FromCuda(error, what));
}

Status Visit::Check(const Status& status) {
  if (!status.ok()) {
    has_failed_ = true;
    caller_.meeting->Fail(caller_.key, Who(), status);
  }
  return status;
}

BlockingMeeting::Rank Visit::Who() const {
  return {
      .op = caller_.op, .rank = caller_.rank, .num_ranks = caller_.num_ranks};
}

Status Visit::Try(std::vector<uint64_t> values, std::shared_ptr<void> keep) {
  const bool has_values = !values.empty();
  TB_ASSIGN_OR_RETURN(
      const SharedEvent event,
      EventPool::Process().Record(caller_.device, caller_.stream));
  BlockingMeeting::Record record;
  record.values = std::move(values);
  record.values.push_back(reinterpret_cast<uint64_t>(event.get()));
  if (keep == nullptr) {
    record.keep = event;
  } else {
    using Both = std::pair<SharedEvent, std::shared_ptr<void>>;
    record.keep = std::make_shared<Both>(event, std::move(keep));
  }
  TB_ASSIGN_OR_RETURN(
      BlockingMeeting::Records records,
      caller_.meeting->Meet(caller_.key, phase_++, Who(), std::move(record)));
  is_between_ = !is_last_;
  for (int r = 0; r < caller_.num_ranks; ++r) {
    if (r == caller_.rank) continue;
    auto* const peer_event =
        reinterpret_cast<cudaEvent_t>((*records)[r].values.back());
    TB_RETURN_IF_ERROR(
        FromCuda(cudaStreamWaitEvent(caller_.stream, peer_event, 0),
                 "cudaStreamWaitEvent"));
  }
  all_records_.push_back(records);
  if (has_values) records_ = std::move(records);
  return OkStatus();
}

Status Visit::TryAwaitOnHost(const SharedEvent& mark) {
  using Clock = std::chrono::steady_clock;
  const PunctualSleeps punctual;
  const auto start = Clock::now();
  const auto limit = caller_.meeting->timeout();
  while (true) {
    const cudaError_t state = cudaEventQuery(mark.get());
    if (state == cudaSuccess) return OkStatus();
    (void)cudaGetLastError();
    if (state != cudaErrorNotReady) {
      return FromCuda(state, "the GPU's earlier work");
    }
    const auto waited = Clock::now() - start;
    if (waited < kYieldFor) {
      std::this_thread::yield();
      continue;
    }
    TB_RETURN_IF_ERROR(caller_.meeting->Failure(caller_.key));
    if (waited > limit) {
      return DeadlineExceeded(
          "GPU " + std::to_string(caller_.device) +
          " did not get to it within " + std::to_string(limit.count()) +
          " ms; JAX_TURBOBUS_EXCHANGE_TIMEOUT_S sets the limit");
    }
    std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace turbobus::moe::cuda

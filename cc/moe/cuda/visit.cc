#include "moe/cuda/visit.h"

#include <cstdint>
#include <utility>

#include "moe/cuda/events.h"

namespace turbobus::moe::cuda {
Status Visit::Meet(std::vector<const void*> addresses) {
  return Check(Try(std::move(addresses)));
}

Status Visit::Check(cudaError_t error, const char* what) {
  return Check(FromCuda(error, what));
}

Status Visit::Check(const Status& status) {
  if (!status.ok()) caller_.meeting->Fail(caller_.key, Who(), status);
  return status;
}

BlockingMeeting::Rank Visit::Who() const {
  return {
      .op = caller_.op, .rank = caller_.rank, .num_ranks = caller_.num_ranks};
}

Status Visit::Try(std::vector<const void*> addresses) {
  TB_ASSIGN_OR_RETURN(
      const SharedEvent event,
      EventPool::Process().Record(caller_.device, caller_.stream));
  BlockingMeeting::Record record;
  for (const void* address : addresses) {
    record.values.push_back(reinterpret_cast<uint64_t>(address));
  }
  record.values.push_back(reinterpret_cast<uint64_t>(event.get()));
  record.keep = event;
  TB_ASSIGN_OR_RETURN(
      BlockingMeeting::Records records,
      caller_.meeting->Meet(caller_.key, phase_++, Who(), std::move(record)));
  for (int r = 0; r < caller_.num_ranks; ++r) {
    if (r == caller_.rank) continue;
    auto* const peer_event =
        reinterpret_cast<cudaEvent_t>((*records)[r].values.back());
    TB_RETURN_IF_ERROR(
        FromCuda(cudaStreamWaitEvent(caller_.stream, peer_event, 0),
                 "cudaStreamWaitEvent"));
  }
  if (!addresses.empty()) records_ = std::move(records);
  return OkStatus();
}

}  // namespace turbobus::moe::cuda

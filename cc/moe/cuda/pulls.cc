#include "moe/cuda/pulls.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

namespace turbobus::moe::cuda {

Status Pulls::Add(int peer, const uint8_t* from, uint8_t* to,
                  int64_t size_bytes) {
  if (size_bytes == 0) return OkStatus();
  auto ring =
      RingPool::Process().Take(caller_.wiring.devices[peer], {caller_.device},
                               caller_.wiring.Between(peer, caller_.rank));
  if (!ring.ok()) return visit_.Check(ring.status());
  const cudaEvent_t own_ready = visit_.EventOf(caller_.rank);
  TB_RETURN_IF_ERROR(
      visit_.Check((*ring)->Await(visit_.EventOf(peer), {&own_ready, 1})));
  Transfer& transfer = transfers_.emplace_back();
  transfer.peer = peer;
  transfer.from = from;
  transfer.to = {to};
  transfer.size_bytes = size_bytes;
  transfer.ring = *std::move(ring);
  return OkStatus();
}

Status Pulls::Start() { return visit_.Check(Enqueue(transfers_)); }

Status Pulls::Await() {
  for (const Transfer& transfer : transfers_) {
    for (const SharedEvent& event : transfer.received) {
      TB_RETURN_IF_ERROR(
          visit_.Check(cudaStreamWaitEvent(caller_.stream, event.get(), 0),
                       "cudaStreamWaitEvent"));
    }
  }
  return OkStatus();
}

Status Pulls::End() {
  // By rank: the event after which its memory is not read.
  std::vector<uint64_t> values(caller_.num_ranks);
  auto keep = std::make_shared<std::vector<SharedEvent>>();
  for (const Transfer& transfer : transfers_) {
    values[transfer.peer] = reinterpret_cast<uint64_t>(transfer.sent.get());
    keep->push_back(transfer.sent);
  }
  TB_RETURN_IF_ERROR(visit_.MeetLast(std::move(values), std::move(keep)));
  transfers_.clear();
  for (int r = 0; r < caller_.num_ranks; ++r) {
    auto* const event =
        reinterpret_cast<cudaEvent_t>(visit_.Value(r, caller_.rank));
    if (event == nullptr) continue;
    TB_RETURN_IF_ERROR(visit_.Check(
        cudaStreamWaitEvent(caller_.stream, event, 0), "cudaStreamWaitEvent"));
  }
  return OkStatus();
}

}  // namespace turbobus::moe::cuda

#include "moe/cuda/ring_transfers.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace turbobus::moe::cuda {

Status RingTransfers::Add(const Pull& pull, std::span<const cudaEvent_t> ready,
                          cudaEvent_t begun) {
  if (pull.num_rows * pull.row_bytes == 0) return OkStatus();
  auto ring = RingPool::Process().Take(
      caller_.wiring.devices[pull.peer], {caller_.device},
      caller_.wiring.Between(pull.peer, caller_.rank));
  if (!ring.ok()) return visit_.Check(ring.status());
  TB_RETURN_IF_ERROR(visit_.Check((*ring)->Await(ready[0], {&begun, 1})));
  Transfer& transfer = transfers_.emplace_back();
  const auto num_shares = std::ssize(ready);
  for (int64_t share = 1; share < num_shares; ++share) {
    transfer.gates.push_back(
        {pull.num_rows * share / num_shares * pull.row_bytes, ready[share]});
  }
  transfer.peer = pull.peer;
  transfer.from = pull.from;
  transfer.to = {pull.to};
  transfer.size_bytes = pull.num_rows * pull.row_bytes;
  transfer.ring = *std::move(ring);
  return OkStatus();
}

Status RingTransfers::Start(int64_t most_parts, int64_t least_bytes) {
  int64_t most = 0;
  for (const Transfer& transfer : transfers_) {
    most = std::max(most, transfer.size_bytes);
  }
  num_parts_ =
      static_cast<int>(std::clamp<int64_t>(most / least_bytes, 1, most_parts));
  for (Transfer& transfer : transfers_) transfer.num_parts = num_parts_;
  const Status status = Enqueue(transfers_);
  visit_.Step("rings");
  return visit_.Check(status);
}

Status RingTransfers::Push(const uint8_t* from, int64_t size_bytes,
                           const std::vector<uint8_t*>& to) {
  if (caller_.num_ranks == 1) return OkStatus();
  std::vector<int> devices;
  std::vector<cudaEvent_t> ready;
  Transfer& transfer = transfers_.emplace_back();
  for (int r = 0; r < caller_.num_ranks; ++r) {
    if (r == caller_.rank) continue;
    readers_.push_back(r);
    devices.push_back(caller_.wiring.devices[r]);
    ready.push_back(visit_.EventOf(r));
    transfer.to.push_back(to[r]);
  }
  transfer.from = from;
  transfer.size_bytes = size_bytes;
  auto ring = RingPool::Process().Take(caller_.device, std::move(devices),
                                       {.kind = Path::Kind::kHost});
  if (!ring.ok()) return visit_.Check(ring.status());
  transfer.ring = *std::move(ring);
  TB_RETURN_IF_ERROR(
      visit_.Check(transfer.ring->Await(visit_.EventOf(caller_.rank), ready)));
  const Status status = Enqueue(transfers_);
  if (transfer.sent != nullptr) TB_RETURN_IF_ERROR(Wait(transfer.sent.get()));
  return visit_.Check(status);
}

Status RingTransfers::Wait(cudaEvent_t event) {
  return visit_.Check(cudaStreamWaitEvent(caller_.stream, event, 0),
                      "cudaStreamWaitEvent");
}

Status RingTransfers::AwaitPart(int part) {
  for (const Transfer& transfer : transfers_) {
    TB_RETURN_IF_ERROR(Wait(transfer.parts[part].event.get()));
  }
  return OkStatus();
}

Status RingTransfers::Await() { return AwaitPart(num_parts_ - 1); }

void RingTransfers::Drain() {
  for (const Transfer& transfer : transfers_) {
    for (const SharedEvent& event : transfer.received) {
      if (event != nullptr) (void)Wait(event.get());
    }
  }
}

Status RingTransfers::End() {
  // By rank: the event after which its memory is not read, or it has all.
  std::vector<uint64_t> values(caller_.num_ranks);
  auto keep = std::make_shared<std::vector<SharedEvent>>();
  const auto tell = [&](int rank, const SharedEvent& event) {
    values[rank] = reinterpret_cast<uint64_t>(event.get());
    keep->push_back(event);
  };
  for (const Transfer& transfer : transfers_) {
    if (readers_.empty()) tell(transfer.peer, transfer.sent);
    for (size_t i = 0; i < readers_.size(); ++i) {
      tell(readers_[i], transfer.received[i]);
    }
  }
  TB_RETURN_IF_ERROR(visit_.MeetLast(std::move(values), std::move(keep)));
  // Had it failed, nobody would know when to wait for: the destructor would.
  transfers_.clear();
  for (int r = 0; r < caller_.num_ranks; ++r) {
    auto* const event =
        reinterpret_cast<cudaEvent_t>(visit_.Value(r, caller_.rank));
    if (event != nullptr) TB_RETURN_IF_ERROR(Wait(event));
  }
  return OkStatus();
}

}  // namespace turbobus::moe::cuda

#include "moe/cuda/transfer.h"

#include <algorithm>
#include <utility>

namespace turbobus::moe::cuda {
namespace {

constexpr int64_t kLeastBlockBytes = 512 << 10;
constexpr int64_t kBlockAlignment = 64 << 10;

/// Records the parts but the last that end with the first `done` bytes.
Status RecordParts(Transfer& transfer, int64_t done) {
  const auto is_due = [&] {
    const auto next = static_cast<int64_t>(transfer.parts.size()) + 1;
    return next < transfer.num_parts &&
           done >= transfer.size_bytes / transfer.num_parts * next;
  };
  while (is_due()) {
    TB_ASSIGN_OR_RETURN(SharedEvent event, transfer.ring->RecordReceived(0));
    transfer.parts.push_back({done, std::move(event)});
  }
  return OkStatus();
}

Status EnqueueBlocks(std::span<Transfer> transfers) {
  std::vector<int64_t> done(transfers.size());
  std::vector<size_t> next_gate(transfers.size());
  std::vector<void*> to;
  for (bool is_over = false; !is_over;) {
    is_over = true;
    for (size_t i = 0; i < transfers.size(); ++i) {
      Transfer& transfer = transfers[i];
      const int64_t size = NextBlockBytes(done[i], transfer.size_bytes,
                                          transfer.ring->block_bytes());
      if (size == 0) continue;
      is_over = false;
      to.clear();
      for (uint8_t* const target : transfer.to) to.push_back(target + done[i]);
      const auto& gates = transfer.gates;
      for (size_t& next = next_gate[i];
           next < gates.size() && gates[next].begin < done[i] + size; ++next) {
        TB_RETURN_IF_ERROR(transfer.ring->AwaitSource(gates[next].ready));
      }
      TB_RETURN_IF_ERROR(
          transfer.ring->Copy(transfer.from + done[i], to, size));
      done[i] += size;
      TB_RETURN_IF_ERROR(RecordParts(transfer, done[i]));
    }
  }
  return OkStatus();
}

Status RecordEnds(Transfer& transfer) {
  TB_ASSIGN_OR_RETURN(transfer.sent, transfer.ring->RecordSent());
  for (size_t i = 0; i < transfer.to.size(); ++i) {
    TB_ASSIGN_OR_RETURN(transfer.received.emplace_back(),
                        transfer.ring->RecordReceived(static_cast<int>(i)));
  }
  transfer.parts.push_back({transfer.size_bytes, transfer.received[0]});
  return OkStatus();
}

}  // namespace

int64_t NextBlockBytes(int64_t done, int64_t total, int64_t most) {
  const int64_t left = total - done;
  const int64_t least = std::min(kLeastBlockBytes, most);
  const int64_t half = left / 2 / kBlockAlignment * kBlockAlignment;
  const int64_t wanted = std::min({done + least, half, most});
  return std::min(left, std::max(wanted, least));
}

Status Enqueue(std::span<Transfer> transfers) {
  Status status = EnqueueBlocks(transfers);
  for (Transfer& transfer : transfers) {
    const Status recorded = RecordEnds(transfer);
    if (status.ok()) status = recorded;
  }
  return status;
}

}  // namespace turbobus::moe::cuda

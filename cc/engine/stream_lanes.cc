#include "engine/stream_lanes.h"

#include <utility>

namespace turbobus::engine {
namespace {

using topo::Direction;
using transport::Stream;
using transport::Streams;

bool IsUnused(const FlightPtr& user, Stream stream) {
  return user == nullptr || user->EndsBefore(stream);
}

bool MayFollow(const FlightPtr& user, Stream stream) {
  return user == nullptr || user->MayBeFollowedOn(stream);
}

Status CreateDirect(Streams& streams, int gpu,
                    std::array<DirectLane, StreamLanes::kDirectLanes>& lanes) {
  for (DirectLane& lane : lanes) {
    TB_ASSIGN_OR_RETURN(lane.stream, streams.CreateStream(gpu));
    TB_ASSIGN_OR_RETURN(lane.round, streams.CreateEvent(gpu, false));
  }
  return OkStatus();
}

}  // namespace

Status StreamLanes::CreateLender(Streams& streams, int gpu, int64_t slot_bytes,
                                 Lender& lender) {
  TB_RETURN_IF_ERROR(streams.LockLender(gpu));
  for (auto& slots : lender.slots) {
    for (RelaySlot& slot : slots) {
      TB_ASSIGN_OR_RETURN(slot.buffer, streams.AllocateDevice(gpu, slot_bytes));
      TB_ASSIGN_OR_RETURN(slot.pcie, streams.CreateStream(gpu));
      TB_ASSIGN_OR_RETURN(slot.fabric, streams.CreateStream(gpu));
      TB_ASSIGN_OR_RETURN(slot.full, streams.CreateEvent(gpu, false));
      TB_ASSIGN_OR_RETURN(slot.free, streams.CreateEvent(gpu, false));
      TB_ASSIGN_OR_RETURN(slot.round, streams.CreateEvent(gpu, false));
    }
  }
  for (RowLane& lane : lender.rows) {
    TB_ASSIGN_OR_RETURN(lane.stream, streams.CreateStream(gpu));
  }
  return OkStatus();
}

StatusOr<StreamLanes> StreamLanes::Create(Streams& streams,
                                          const std::vector<topo::Path>& paths,
                                          int64_t slot_bytes,
                                          std::vector<std::string>& dropped) {
  StreamLanes lanes;
  lanes.slot_bytes_ = slot_bytes;
  dropped.assign(paths.size(), "");
  std::map<int, Status> lender_status;
  for (size_t i = 0; i < paths.size(); ++i) {
    const topo::Path& path = paths[i];
    if (!path.is_relay()) {
      const std::pair key(path.gpu, static_cast<int>(path.direction));
      if (lanes.direct_.contains(key)) continue;
      TB_RETURN_IF_ERROR(CreateDirect(streams, path.gpu, lanes.direct_[key]));
      continue;
    }
    Status status = streams.EnablePeerAccess(path.relay, path.gpu);
    if (status.ok()) {
      const auto [it, is_new] = lender_status.try_emplace(path.relay);
      if (is_new) {
        Lender lender;
        it->second = CreateLender(streams, path.relay, slot_bytes, lender);
        if (it->second.ok()) {
          lanes.lenders_.emplace(path.relay, std::move(lender));
          lanes.staging_bytes_[path.relay] = 4 * slot_bytes;
        }
      }
      status = it->second;
    }
    if (!status.ok()) dropped[i] = status.message();
  }
  return lanes;
}

DirectLane* StreamLanes::PickDirect(int gpu, Direction direction,
                                    Stream stream) {
  const auto it = direct_.find({gpu, static_cast<int>(direction)});
  if (it == direct_.end()) return nullptr;
  DirectLane* behind = nullptr;
  for (DirectLane& lane : it->second) {
    if (lane.user == nullptr || lane.user->is_finished) lane.queued_blocks = 0;
    if (lane.queued_blocks > kMaxQueuedBlocks) continue;
    if (IsUnused(lane.user, stream)) return &lane;
    if (MayFollow(lane.user, stream)) behind = &lane;
  }
  return behind;
}

std::vector<RelaySlot*> StreamLanes::PickSlots(int relay, int gpu,
                                               Direction direction,
                                               Stream stream,
                                               int64_t transfer) {
  const auto it = lenders_.find(relay);
  if (it == lenders_.end()) return {};
  Lender& lender = it->second;
  const auto d = static_cast<size_t>(direction);
  if (lender.borrower[d] != gpu) {
    if (lender.borrower[d] >= 0) lender.rival_id[d] = transfer;
    lender.borrower[d] = gpu;
  }
  const bool is_alone = lender.rival_id[d] < transfer - kRivalTransfers;
  std::vector<RelaySlot*> picked;
  for (RelaySlot& slot : lender.slots[d]) {
    if (slot.user == nullptr || slot.user->is_finished) slot.queued_blocks = 0;
    if (slot.queued_blocks > kMaxQueuedBlocks) continue;
    if (!MayFollow(slot.user, stream)) continue;
    picked.push_back(&slot);
  }
  if (is_alone || picked.size() < 2) return picked;
  // Each borrower keeps to the slot that it had, or else an unused one.
  const bool first_is_ours =
      IsUnused(picked[0]->user, stream) ||
      (picked[0]->user->gpu == gpu && !IsUnused(picked[1]->user, stream));
  return {first_is_ours ? picked[0] : picked[1]};
}

RowLane* StreamLanes::PickRows(int relay, Direction direction, Stream stream) {
  const auto it = lenders_.find(relay);
  if (it == lenders_.end()) return nullptr;
  RowLane& lane = it->second.rows[static_cast<size_t>(direction)];
  return MayFollow(lane.user, stream) ? &lane : nullptr;
}

}  // namespace turbobus::engine

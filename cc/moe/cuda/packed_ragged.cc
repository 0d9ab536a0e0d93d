#include "moe/cuda/packed_ragged.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moe/cuda/cutter.h"
#include "moe/cuda/mail.h"
#include "moe/cuda/ring_transfers.h"
#include "moe/cuda/visit.h"
#include "moe/ragged_parcels.h"

namespace turbobus::moe::cuda {
namespace {

using Piece = RaggedParcels::Piece;

/// Rows that move within one GPU: to the kernels a ragged exchange of one rank.
struct LocalMove {
  RaggedSizes sizes;
  std::vector<int32_t> table;  // s32[4, num_slices]
};

/// One rank's call.
class PackedRagged {
 public:
  PackedRagged(const Caller& caller, const GpuRagged& call, ParcelWay way)
      : caller_(caller),
        call_(call),
        sizes_(call.sizes),
        way_(way),
        visit_(caller),
        transfers_(caller, visit_) {}
  ~PackedRagged();
  PackedRagged(const PackedRagged&) = delete;
  PackedRagged& operator=(const PackedRagged&) = delete;

  Status Run();

 private:
  /// Swaps the ranks' tables, and plans.
  Status Plan();
  /// `pieces` as slices; of an exchange from boxes, or into them.
  StatusOr<LocalMove> Make(const std::vector<Piece>& pieces, bool from_boxes,
                           int64_t num_rows) const;
  /// Device memory for tables, kernels and boxes.
  Status Allocate(const LocalMove& pack, const LocalMove& unpack);
  Status Pack(const LocalMove& move);
  Status Pull();
  Status Unpack(const LocalMove& move);
  /// Copies a table to the device.
  Status Post(const LocalMove& move, int32_t* table);

  bool is_forward() const { return way_ == ParcelWay::kForward; }
  int64_t source_rows() const {
    return sizes_.num_batches *
           (is_forward() ? sizes_.operand_rows : sizes_.output_rows);
  }
  int64_t result_rows() const {
    return sizes_.num_batches *
           (is_forward() ? sizes_.output_rows : sizes_.operand_rows);
  }
  int64_t table_bytes() const {
    return sizes_.num_tables * 4 * sizes_.num_slices *
           static_cast<int64_t>(sizeof(int32_t));
  }

  const Caller& caller_;
  const GpuRagged& call_;
  const RaggedSizes sizes_;
  const ParcelWay way_;
  Visit visit_;
  RingTransfers transfers_;
  std::shared_ptr<Mail> mail_;
  RaggedParcels plan_;
  // Device memory of the call.
  int32_t* pack_table_ = nullptr;
  int32_t* unpack_table_ = nullptr;
  void* pack_scratch_ = nullptr;
  void* unpack_scratch_ = nullptr;
  uint8_t* boxes_ = nullptr;
};

PackedRagged::~PackedRagged() {
  if (mail_ == nullptr) return;
  auto event = EventPool::Process().Record(caller_.device, caller_.stream);
  // Without an event the device is lost, and nobody will write.
  if (event.ok()) mail_->AddUser(*event);
}

Status PackedRagged::Plan() {
  auto mail = MailPool::Process().Take(table_bytes(), caller_.stream);
  if (!mail.ok()) return visit_.Check(mail.status());
  mail_ = *std::move(mail);
  TB_RETURN_IF_ERROR(
      visit_.Check(cudaMemcpyAsync(mail_->data(), call_.table,
                                   static_cast<size_t>(table_bytes()),
                                   cudaMemcpyDefault, caller_.stream),
                   "copy of a table"));
  TB_ASSIGN_OR_RETURN(const SharedEvent posted, visit_.Mark());
  TB_RETURN_IF_ERROR(visit_.AwaitOnHost(posted));
  TB_RETURN_IF_ERROR(
      visit_.MeetWith({reinterpret_cast<uint64_t>(mail_->data())}, mail_));
  // As the tables of all ranks come out of an all-gather.
  const int64_t num_ints = int64_t{4} * sizes_.num_slices;
  std::vector<std::vector<int32_t>> gathered(sizes_.num_tables);
  std::vector<RaggedTable> tables;
  for (int64_t t = 0; t < sizes_.num_tables; ++t) {
    for (int r = 0; r < sizes_.num_ranks; ++r) {
      const auto* const fields =
          reinterpret_cast<const int32_t*>(visit_.Value(r, 0)) + t * num_ints;
      gathered[t].insert(gathered[t].end(), fields, fields + num_ints);
    }
    tables.emplace_back(gathered[t], sizes_.num_ranks, sizes_.num_slices);
    Status status =
        tables.back().Check(sizes_.operand_rows, sizes_.output_rows);
    if (!status.ok() && sizes_.num_tables > 1) {
      status = status.WithContext("batch " + std::to_string(t));
    }
    // The others find the same.
    TB_RETURN_IF_ERROR(visit_.Check(status));
  }
  plan_ = PlanParcels(tables,
                      {.num_ranks = sizes_.num_ranks,
                       .num_batches = sizes_.num_batches,
                       .operand_rows = sizes_.operand_rows,
                       .output_rows = sizes_.output_rows},
                      way_, sizes_.rank);
  return OkStatus();
}

StatusOr<LocalMove> PackedRagged::Make(const std::vector<Piece>& pieces,
                                       bool from_boxes,
                                       int64_t num_rows) const {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  if (std::ssize(pieces) > kMaxRaggedSlices || num_rows > kMostRows ||
      plan_.num_box_rows > kMostRows) {
    return Unimplemented(
        std::to_string(num_rows) + " rows, and " +
        std::to_string(plan_.num_box_rows) + " that travel, in " +
        std::to_string(pieces.size()) + " pieces: at most 2^31 - 1 and " +
        std::to_string(kMaxRaggedSlices) + " on GPUs without peer access");
  }
  LocalMove move;
  // An empty slice moves nothing.
  const auto num_slices = std::max<int64_t>(1, std::ssize(pieces));
  move.sizes = {.num_slices = static_cast<int>(num_slices),
                .operand_rows = from_boxes ? plan_.num_box_rows : num_rows,
                .output_rows = from_boxes ? num_rows : plan_.num_box_rows,
                .row_bytes = sizes_.row_bytes};
  move.table.resize(4 * num_slices);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const auto row = static_cast<int32_t>(piece.row);
    const auto box_row = static_cast<int32_t>(piece.box_row);
    move.table[i] = from_boxes ? box_row : row;
    move.table[2 * num_slices + i] = from_boxes ? row : box_row;
    move.table[num_slices + i] = static_cast<int32_t>(piece.num_rows);
    move.table[3 * num_slices + i] = static_cast<int32_t>(piece.num_rows);
  }
  return move;
}

Status PackedRagged::Allocate(const LocalMove& pack, const LocalMove& unpack) {
  const auto cut = [&](Cutter cutter) {
    pack_table_ = cutter.Take<int32_t>(std::ssize(pack.table));
    unpack_table_ = cutter.Take<int32_t>(std::ssize(unpack.table));
    pack_scratch_ = cutter.Take<uint8_t>(RaggedPushScratchBytes(pack.sizes));
    unpack_scratch_ = cutter.Take<uint8_t>(
        is_forward() ? RaggedPushScratchBytes(unpack.sizes)
                     : RaggedSumScratchBytes(unpack.sizes));
    boxes_ = cutter.Take<uint8_t>(plan_.num_box_rows * sizes_.row_bytes);
    return cutter.used_bytes();
  };
  TB_ASSIGN_OR_RETURN(void* const memory, call_.allocate(cut(Cutter(nullptr))));
  cut(Cutter(memory));
  return OkStatus();
}

Status PackedRagged::Post(const LocalMove& move, int32_t* table) {
  // From memory that is not pinned: it has been read when this returns.
  return FromCuda(cudaMemcpyAsync(table, move.table.data(),
                                  move.table.size() * sizeof(int32_t),
                                  cudaMemcpyHostToDevice, caller_.stream),
                  "copy of a table");
}

Status PackedRagged::Pack(const LocalMove& move) {
  RaggedPushArgs args;
  args.operand = call_.source;
  args.scratch = pack_scratch_;
  args.tables.of[0] = pack_table_;
  args.results.of[0] = boxes_;
  return FromCuda(LaunchRaggedPush(move.sizes, args, caller_.stream),
                  "pack kernel");
}

Status PackedRagged::Pull() {
  TB_RETURN_IF_ERROR(visit_.Meet({boxes_}));
  const Peers<const uint8_t> boxes = visit_.Addresses<const uint8_t>(0);
  for (int peer = 0; peer < sizes_.num_ranks; ++peer) {
    if (peer == sizes_.rank) continue;
    const RaggedParcels::Parcel& parcel = plan_.parcels[peer];
    const cudaEvent_t ready = visit_.EventOf(peer);
    TB_RETURN_IF_ERROR(transfers_.Add(
        {.peer = peer,
         .from = boxes.of[peer] + parcel.peer_box_row * sizes_.row_bytes,
         .to = boxes_ + parcel.box_row * sizes_.row_bytes,
         .num_rows = parcel.num_rows,
         .row_bytes = sizes_.row_bytes},
        {&ready, 1}, visit_.EventOf(sizes_.rank)));
  }
  TB_RETURN_IF_ERROR(transfers_.Start());
  return transfers_.Await();
}

Status PackedRagged::Unpack(const LocalMove& move) {
  if (is_forward()) {
    RaggedPushArgs args;
    args.operand = boxes_;
    args.is_onto_zeros = call_.is_onto_zeros;
    args.scratch = unpack_scratch_;
    args.tables.of[0] = unpack_table_;
    args.results.of[0] = call_.result;
    return FromCuda(LaunchRaggedPush(move.sizes, args, caller_.stream),
                    "unpack kernel");
  }
  RaggedSumArgs args;
  args.result = call_.result;
  args.scratch = unpack_scratch_;
  args.tables.of[0] = unpack_table_;
  args.cotangents.of[0] = boxes_;
  return FromCuda(
      LaunchRaggedSum(move.sizes, call_.dtype, args, caller_.stream),
      "row-sum kernel");
}

Status PackedRagged::Run() {
  TB_RETURN_IF_ERROR(Plan());
  const auto run = [&]() -> Status {
    TB_ASSIGN_OR_RETURN(const LocalMove pack,
                        Make(plan_.pack, /*from_boxes=*/false, source_rows()));
    TB_ASSIGN_OR_RETURN(const LocalMove unpack,
                        Make(plan_.unpack, is_forward(), result_rows()));
    TB_RETURN_IF_ERROR(Allocate(pack, unpack));
    // A copy from memory that is not pinned may wait for the stream: both
    // before it waits for peers.
    TB_RETURN_IF_ERROR(Post(pack, pack_table_));
    TB_RETURN_IF_ERROR(Post(unpack, unpack_table_));
    TB_RETURN_IF_ERROR(Pack(pack));
    TB_RETURN_IF_ERROR(Pull());
    TB_RETURN_IF_ERROR(Unpack(unpack));
    return transfers_.End();
  };
  return visit_.Check(run());
}

}  // namespace

Status PackedRaggedPush(const Caller& caller, const GpuRagged& call) {
  return PackedRagged(caller, call, ParcelWay::kForward).Run();
}

Status PackedRaggedSum(const Caller& caller, const GpuRagged& call) {
  return PackedRagged(caller, call, ParcelWay::kTranspose).Run();
}

}  // namespace turbobus::moe::cuda

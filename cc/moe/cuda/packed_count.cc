#include "moe/cuda/packed_count.h"

#include <memory>
#include <vector>

#include "moe/cuda/cutter.h"
#include "moe/cuda/known_totals.h"
#include "moe/cuda/mail.h"
#include "moe/cuda/packed_layout.h"
#include "moe/cuda/visit.h"

namespace turbobus::moe::cuda {
namespace {

constexpr int64_t kWordBytes = sizeof(int32_t);

/// A part's place in mail: its counts, s32[num_experts], then its totals,
/// s32[num_ranks].
int64_t PartBytes(const Shape& shape) {
  constexpr int64_t kAlignment = 256;
  const int64_t bytes = (shape.num_experts + shape.num_ranks) * kWordBytes;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct Scratch {
  Scratch(const GpuCount& call, void* memory) {
    const Shape& shape = call.shape;
    Cutter cutter(memory);
    for (size_t i = 0; i < call.parts.size(); ++i) {
      block_offsets.push_back(
          cutter.Take<int32_t>(PlanScratchBytes(shape) / kWordBytes));
    }
    counts = cutter.Take<int32_t>(static_cast<int64_t>(shape.num_ranks) *
                                  shape.num_experts);
    sizes = cutter.Take<int32_t>(int64_t{2} * shape.num_local_experts);
    index = cutter.Take<int32_t>(static_cast<int64_t>(shape.num_ranks) *
                                 shape.num_tokens);
    number_blocks =
        cutter.Take<int32_t>(NumberScratchBytes(shape) / kWordBytes);
    size_bytes = cutter.used_bytes();
  }

  std::vector<int32_t*> block_offsets;  // Of each part's plan.
  // Of one part after the other.
  int32_t* counts = nullptr;  // [num_ranks, num_experts]
  int32_t* sizes = nullptr;   // Group sizes and wanted ones, read by nobody.
  int32_t* index = nullptr;
  int32_t* number_blocks = nullptr;
  int64_t size_bytes = 0;
};

/// One rank's call.
class Count {
 public:
  Count(const Caller& caller, const GpuCount& call)
      : caller_(caller),
        call_(call),
        shape_(call.shape),
        scratch_(call, call.scratch),
        visit_(caller) {}
  ~Count();

  Status Run();

 private:
  Status Plan();
  Status CountPart(size_t part);
  int32_t* CountsOf(Mail& mail, size_t part) const {
    return reinterpret_cast<int32_t*>(mail.data() + static_cast<int64_t>(part) *
                                                        PartBytes(shape_));
  }
  int32_t* TotalsOf(size_t part) const {
    return CountsOf(*mail_, part) + shape_.num_experts;
  }

  const Caller& caller_;
  const GpuCount& call_;
  const Shape shape_;
  const Scratch scratch_;
  Visit visit_;
  std::shared_ptr<Mail> mail_;
  std::vector<Mail*> mails_;  // By rank; `visit_` keeps them.
};

Count::~Count() {
  if (mail_ == nullptr) return;
  auto event = EventPool::Process().Record(caller_.device, caller_.stream);
  if (!event.ok()) return;  // The device is lost.
  mail_->AddUser(*event);
  for (Mail* const mail : mails_) {
    if (mail != mail_.get()) mail->AddUser(*event);
  }
}

Status Count::Plan() {
  for (size_t i = 0; i < call_.parts.size(); ++i) {
    TB_RETURN_IF_ERROR(visit_.Check(
        LaunchPlan(shape_, call_.parts[i].expert_ids, CountsOf(*mail_, i),
                   scratch_.block_offsets[i], caller_.stream),
        "plan kernel"));
  }
  return OkStatus();
}

Status Count::CountPart(size_t part) {
  const GpuCount::Part& here = call_.parts[part];
  PositionsArgs positions = {
      .counts = {},
      .expert_ids = here.expert_ids,
      .block_offsets = scratch_.block_offsets[part],
      .positions = here.slots,
      .group_sizes = scratch_.sizes,
      .wanted = scratch_.sizes + shape_.num_local_experts,
      .posted_ids = nullptr,
      .posted_positions = nullptr};
  WordCopies copies;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    int32_t* const counts = scratch_.counts + r * shape_.num_experts;
    copies.Add(CountsOf(*mails_[r], part), counts, shape_.num_experts);
    positions.counts.of[r] = counts;
  }
  TB_RETURN_IF_ERROR(
      visit_.Check(LaunchWordCopies(copies, caller_.stream), "counts kernel"));
  TB_RETURN_IF_ERROR(visit_.Check(
      LaunchPositions(shape_, positions, caller_.stream), "positions kernel"));
  NumberArgs number = {.expert_ids = {},
                       .positions = {},
                       .is_outgoing = true,
                       .index = scratch_.index,
                       .block_counts = scratch_.number_blocks,
                       .totals = TotalsOf(part)};
  number.expert_ids.of[shape_.rank] = here.expert_ids;
  number.positions.of[shape_.rank] = here.slots;
  return visit_.Check(LaunchNumber(shape_, number, caller_.stream),
                      "number kernel");
}

Status Count::Run() {
  auto mail = MailPool::Process().Take(
      static_cast<int64_t>(call_.parts.size()) * PartBytes(shape_),
      caller_.stream);
  if (!mail.ok()) return visit_.Check(mail.status());
  mail_ = *std::move(mail);
  TB_RETURN_IF_ERROR(Plan());
  TB_RETURN_IF_ERROR(
      visit_.MeetLast({reinterpret_cast<uint64_t>(mail_.get())}, mail_));
  for (int r = 0; r < shape_.num_ranks; ++r) {
    mails_.push_back(reinterpret_cast<Mail*>(visit_.Value(r, 0)));
  }
  for (size_t i = 0; i < call_.parts.size(); ++i) {
    TB_RETURN_IF_ERROR(CountPart(i));
  }
  TB_ASSIGN_OR_RETURN(const SharedEvent counted, visit_.Mark());
  for (size_t i = 0; i < call_.parts.size(); ++i) {
    KnownTotals::Early().Put(
        {caller_.device, caller_.key.run_id, call_.parts[i].slots},
        {.shape = shape_,
         .devices = caller_.wiring.devices,
         .counted = counted,
         .totals = {mail_, TotalsOf(i)}});
  }
  return OkStatus();
}

/// Whether a host waits for a count: where rows go by rings.
bool IsNeeded(const Caller& caller, const GpuCount& call) {
  const PackedLayout layout(PackedOp::kDispatch, call.shape, caller.wiring, 0);
  return !layout.is_mailed && !layout.is_broadcast && !call.parts.empty();
}

}  // namespace

int64_t PackedScratchBytes(const Caller& caller, const GpuCount& call) {
  return IsNeeded(caller, call) ? Scratch(call, nullptr).size_bytes : 0;
}

Status PackedCount(const Caller& caller, const GpuCount& call) {
  return IsNeeded(caller, call) ? Count(caller, call).Run() : OkStatus();
}

}  // namespace turbobus::moe::cuda

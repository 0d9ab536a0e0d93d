#include "moe/cuda/gpu_ragged.h"

#include "moe/cuda/packed_ragged.h"
#include "moe/cuda/ragged_faults.h"
#include "moe/cuda/visit.h"

namespace turbobus::moe::cuda {

Status RunRaggedPush(const Caller& caller, const GpuRagged& call) {
  if (!caller.wiring.is_direct) return PackedRaggedPush(caller, call);
  Visit visit(caller);
  const auto report = RaggedFaults::Process().Begin(caller.device);
  TB_RETURN_IF_ERROR(visit.Check(report.status()));
  TB_RETURN_IF_ERROR(visit.Meet({call.table, call.result}));
  const RaggedPushArgs args = {.tables = visit.Addresses<const int32_t>(0),
                               .operand = call.source,
                               .results = visit.Addresses<uint8_t>(1),
                               .is_onto_zeros = call.is_onto_zeros,
                               .scratch = call.scratch,
                               .report = *report};
  TB_RETURN_IF_ERROR(visit.Check(
      LaunchRaggedPush(call.sizes, args, caller.stream), "push kernel"));
  return visit.MeetLast();
}

Status RunRaggedSum(const Caller& caller, const GpuRagged& call) {
  if (!caller.wiring.is_direct) return PackedRaggedSum(caller, call);
  Visit visit(caller);
  TB_RETURN_IF_ERROR(visit.Meet({call.table, call.source}));
  const RaggedSumArgs args = {.tables = visit.Addresses<const int32_t>(0),
                              .cotangents = visit.Addresses<const uint8_t>(1),
                              .result = call.result,
                              .scratch = call.scratch};
  TB_RETURN_IF_ERROR(
      visit.Check(LaunchRaggedSum(call.sizes, call.dtype, args, caller.stream),
                  "row-sum kernel"));
  return visit.MeetLast();
}

}  // namespace turbobus::moe::cuda

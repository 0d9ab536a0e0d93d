#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "ffi/cuda/moe_calls.h"
#include "ffi/cuda/nvtx_range.h"
#include "ffi/cuda/targets.h"
#include "ffi/error.h"
#include "ffi/moe_operands.h"
#include "moe/cuda/side_streams.h"

// The exchange handlers for GPUs: the data of those for CPU devices, and
// attributes that say where the ranks are. There are no keys, and the rank is
// no operand: reading it would make the host wait, and making it costs kernels.
//
// Each handler is there twice: on the program's stream, and as a *start* on a
// stream of ours, whose operands and results nobody may touch before
// `turbobus_moe_finish` has had the results. If another op fails before that,
// the run's end waits for the exchange (`SideRun`).

namespace turbobus::ffi {
namespace {

using moe::cuda::SideStreams;
using xla::ffi::Error;
using xla::ffi::RunId;
using Result = xla::ffi::Result<AnyBuffer>;

enum class Way { kInline, kStart };

/// Runs an exchange beside the program; `results` are its own until they are
/// finished.
template <typename Exchange>
Status RunBeside(const GpuContext& program,
                 std::initializer_list<AnyBuffer> results, Exchange exchange) {
  std::vector<const void*> addresses;
  addresses.reserve(results.size());
  for (const AnyBuffer& result : results) {
    addresses.push_back(result.untyped_data());
  }
  return SideStreams::Process().Run(
      {program.device, program.run_id, program.stream}, addresses,
      [&](const StatusOr<SideStreams::Lane*>& lane) {
        // Without a lane there is no memory either, which an exchange tells the
        // ranks that wait for it.
        return exchange(
            GpuContext{.stream = lane.ok() ? (*lane)->stream() : program.stream,
                       .device = program.device,
                       .run_id = program.run_id,
                       .allocate = [&](int64_t size_bytes) -> StatusOr<void*> {
                         if (!lane.ok()) return lane.status();
                         return (*lane)->Allocate(size_bytes);
                       }});
      });
}

/// XLA has one for each start while it enqueues a run on a device. It destroys
/// them when all is enqueued or an op has failed, before anybody else has the
/// run's buffers: nothing that is under way then may write into them later.
class SideRun {
 public:
  static xla::ffi::TypeId id;

  explicit SideRun(const SideStreams::Program& program) : program_(program) {}
  ~SideRun() { SideStreams::Process().Leave(program_); }
  SideRun(const SideRun&) = delete;
  SideRun& operator=(const SideRun&) = delete;

 private:
  const SideStreams::Program program_;
};

xla::ffi::TypeId SideRun::id = XLA_FFI_UNKNOWN_TYPE_ID;
// Behind the class: of an incomplete one the destructor would not be called.
constexpr xla::ffi::TypeInfo kSideRunInfo = xla::ffi::MakeTypeInfo<SideRun>();

xla::ffi::ErrorOr<std::unique_ptr<SideRun>> BeginSideRun(
    cudaStream_t stream, int32_t device, RunId run_id,
    xla::ffi::RemainingArgs /*args*/, xla::ffi::RemainingRets /*results*/,
    xla::ffi::Dictionary /*attributes*/) {
  return std::make_unique<SideRun>(
      SideStreams::Program{device, run_id.run_id, stream});
}

/// `op` and `axis` are for profilers.
template <Way kWay, typename Exchange>
Error Run(std::string_view op, std::string_view axis, const GpuContext& program,
          std::initializer_list<AnyBuffer> results, Exchange exchange) {
  constexpr bool kIsStart = kWay == Way::kStart;
  const NvtxRange range(
      {"turbobus ", kIsStart ? "start of " : "", op, " over axis ", axis});
  if constexpr (!kIsStart) {
    return ToError(exchange(program));
  } else {
    return ToError(RunBeside(program, results, exchange));
  }
}

Error Dispatch(cudaStream_t stream, int32_t device, RunId run_id,
               xla::ffi::ScratchAllocator scratch, GpuExchange exchange,
               AnyBuffer tokens, AnyBuffer expert_ids, Result rows,
               Result group_sizes, Result wanted, Result slots) {
  return Run<Way::kInline>(
      "dispatch", exchange.axis, OnStream(stream, device, run_id, scratch),
      {*rows, *group_sizes, *wanted, *slots}, [&](const GpuContext& context) {
        return DispatchOnGpu(context, exchange, tokens, expert_ids, *rows,
                             *group_sizes, *wanted, *slots);
      });
}

/// With what counting it early has returned.
Error DispatchStart(cudaStream_t stream, int32_t device, RunId run_id,
                    xla::ffi::ScratchAllocator scratch, GpuExchange exchange,
                    AnyBuffer tokens, AnyBuffer expert_ids, Result rows,
                    Result group_sizes, Result wanted, Result slots,
                    AnyBuffer early) {
  return Run<Way::kStart>(
      "dispatch", exchange.axis, OnStream(stream, device, run_id, scratch),
      {*rows, *group_sizes, *wanted, *slots}, [&](const GpuContext& context) {
        return DispatchOnGpu(context, exchange, tokens, expert_ids, *rows,
                             *group_sizes, *wanted, *slots, &early);
      });
}

/// The ids of each dispatch to come.
Error Count(cudaStream_t stream, int32_t device, RunId run_id,
            xla::ffi::ScratchAllocator scratch, GpuEarlyCount count,
            xla::ffi::RemainingArgs args, xla::ffi::RemainingRets results) {
  std::vector<AnyBuffer> expert_ids;
  std::vector<AnyBuffer> slots;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto ids = args.get<AnyBuffer>(i);
    auto result = results.get<AnyBuffer>(i);
    if (!ids.has_value()) return ids.error();
    if (!result.has_value()) return result.error();
    expert_ids.push_back(*ids);
    slots.push_back(**result);
  }
  const NvtxRange range({"turbobus count over axis ", count.axis});
  return ToError(CountOnGpu(OnStream(stream, device, run_id, scratch), count,
                            expert_ids, slots));
}

template <Way kWay>
Error Combine(cudaStream_t stream, int32_t device, RunId run_id,
              xla::ffi::ScratchAllocator scratch, GpuExchange exchange,
              AnyBuffer rows, AnyBuffer expert_ids, AnyBuffer slots,
              AnyBuffer weights, Result sums) {
  return Run<kWay>("combine", exchange.axis,
                   OnStream(stream, device, run_id, scratch), {*sums},
                   [&](const GpuContext& context) {
                     return CombineOnGpu(context, exchange, rows, expert_ids,
                                         slots, &weights, *sums);
                   });
}

template <Way kWay>
Error DispatchGrad(cudaStream_t stream, int32_t device, RunId run_id,
                   xla::ffi::ScratchAllocator scratch, GpuExchange exchange,
                   AnyBuffer rows, AnyBuffer expert_ids, AnyBuffer slots,
                   Result sums) {
  return Run<kWay>("dispatch's gradient", exchange.axis,
                   OnStream(stream, device, run_id, scratch), {*sums},
                   [&](const GpuContext& context) {
                     return CombineOnGpu(context, exchange, rows, expert_ids,
                                         slots, nullptr, *sums);
                   });
}

template <Way kWay>
Error CombineGrad(cudaStream_t stream, int32_t device, RunId run_id,
                  xla::ffi::ScratchAllocator scratch, GpuExchange exchange,
                  AnyBuffer sum_grads, AnyBuffer rows, AnyBuffer expert_ids,
                  AnyBuffer slots, AnyBuffer weights, AnyBuffer group_sizes,
                  Result row_grads, Result weight_grads) {
  return Run<kWay>("combine's gradient", exchange.axis,
                   OnStream(stream, device, run_id, scratch),
                   {*row_grads, *weight_grads}, [&](const GpuContext& context) {
                     return CombineGradOnGpu(
                         context, exchange, sum_grads, rows, expert_ids, slots,
                         weights, group_sizes, *row_grads, *weight_grads);
                   });
}

/// Results of a start, then what must live until it is over; the former are
/// this call's results too.
Error Finish(cudaStream_t stream, int32_t device, RunId run_id,
             std::string_view op, xla::ffi::RemainingArgs args,
             xla::ffi::RemainingRets results) {
  const NvtxRange range({"turbobus finish of ", op});
  Status copied;
  std::vector<const void*> addresses;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto started = args.get<AnyBuffer>(i);
    auto result = results.get<AnyBuffer>(i);
    if (!started.has_value()) return started.error();
    if (!result.has_value()) return result.error();
    if (copied.ok() && started->untyped_data() != (*result)->untyped_data()) {
      copied = FailedPrecondition(
          std::string(op) + ": XLA copied result " + std::to_string(i) +
          " of an exchange under way; please report the program");
    }
    addresses.push_back(started->untyped_data());
  }
  const Status joined = SideStreams::Process()
                            .Join({device, run_id.run_id, stream}, addresses)
                            .WithContext(op);
  return ToError(copied.ok() ? joined : copied);
}

/// What every exchange begins with.
auto Bind() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Ctx<RunId>()
      .Ctx<xla::ffi::ScratchAllocator>()
      .Attrs<GpuExchange>();
}

#define TB_DEFINE_BOTH(name)                                               \
  XLA_FFI_DEFINE_HANDLER(k##name, name<Way::kInline>, Bind##name(Bind())); \
  XLA_FFI_DEFINE_HANDLER(k##name##Start, name<Way::kStart>, Bind##name(Bind()))

XLA_FFI_DEFINE_HANDLER(kDispatch, Dispatch, BindDispatch(Bind()));
XLA_FFI_DEFINE_HANDLER(kDispatchStart, DispatchStart,
                       BindDispatch(Bind()).Arg<AnyBuffer>());
TB_DEFINE_BOTH(Combine);
TB_DEFINE_BOTH(DispatchGrad);
TB_DEFINE_BOTH(CombineGrad);

XLA_FFI_DEFINE_HANDLER(kCount, Count,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<xla::ffi::DeviceOrdinal>()
                           .Ctx<RunId>()
                           .Ctx<xla::ffi::ScratchAllocator>()
                           .Attrs<GpuEarlyCount>()
                           .RemainingArgs()
                           .RemainingRets());

XLA_FFI_DEFINE_HANDLER(
    kBeginSideRun, BeginSideRun,
    xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
        .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
        .Ctx<xla::ffi::DeviceOrdinal>()
        .Ctx<RunId>()
        .RemainingArgs()
        .RemainingRets()
        .Attrs());

XLA_FFI_DEFINE_HANDLER(kFinish, Finish,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<xla::ffi::DeviceOrdinal>()
                           .Ctx<RunId>()
                           .Attr<std::string_view>("op")
                           .RemainingArgs()
                           .RemainingRets());

#undef TB_DEFINE_BOTH

}  // namespace

std::vector<StateType> CudaMoeStateTypes() {
  return {{"turbobus_moe_side_run", &SideRun::id, &kSideRunInfo}};
}

std::vector<Target> CudaMoeTargets() {
  return {
      {"turbobus_moe_dispatch", kDispatch},
      {"turbobus_moe_dispatch_start", kDispatchStart, kBeginSideRun},
      {"turbobus_moe_dispatch_grad", kDispatchGrad},
      {"turbobus_moe_dispatch_grad_start", kDispatchGradStart, kBeginSideRun},
      {"turbobus_moe_combine", kCombine},
      {"turbobus_moe_combine_start", kCombineStart, kBeginSideRun},
      {"turbobus_moe_combine_grad", kCombineGrad},
      {"turbobus_moe_combine_grad_start", kCombineGradStart, kBeginSideRun},
      {"turbobus_moe_count", kCount},
      {"turbobus_moe_finish", kFinish},
  };
}

}  // namespace turbobus::ffi

#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/moe_call.h"
#include "ffi/moe_checks.h"
#include "ffi/moe_decode.h"
#include "ffi/moe_operands.h"
#include "ffi/moe_targets.h"
#include "moe/exchange.h"
#include "moe/huge_pages.h"
#include "moe/rows.h"

// The handlers of dispatch, combine and their gradients on CPU devices: decode,
// check, meet. Shapes carry leading batch axes, all the same: what vmap added.

namespace turbobus::ffi {

/// The attributes of an exchange on CPU devices.
struct CpuExchange {
  std::string_view axis;
  int64_t num_experts = 0;
  int64_t expert_capacity = 0;
  int64_t schedule = 0;

  Attributes Named(std::string_view op) const {
    return {op, axis, num_experts, expert_capacity, schedule};
  }
};

/// Those of a plan, which has no rows to read their number off.
struct CpuPlan : CpuExchange {
  int64_t num_rows = 0;
};

}  // namespace turbobus::ffi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    turbobus::ffi::CpuExchange,
    xla::ffi::StructMember<std::string_view>("axis"),
    xla::ffi::StructMember<int64_t>("num_experts"),
    xla::ffi::StructMember<int64_t>("expert_capacity"),
    xla::ffi::StructMember<int64_t>("schedule"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    turbobus::ffi::CpuPlan, xla::ffi::StructMember<std::string_view>("axis"),
    xla::ffi::StructMember<int64_t>("num_experts"),
    xla::ffi::StructMember<int64_t>("expert_capacity"),
    xla::ffi::StructMember<int64_t>("schedule"),
    xla::ffi::StructMember<int64_t>("num_rows"));

namespace turbobus::ffi {
namespace {

using xla::ffi::AnyBuffer;
using Result = xla::ffi::Result<AnyBuffer>;

template <typename Call>
class CallMember : public FutureMember {
 public:
  Call call;
};

template <typename Call, StatusOr<std::unique_ptr<moe::Work>> (*kMake)(
                             std::span<const Call* const>)>
StatusOr<std::unique_ptr<moe::Work>> MakeFrom(moe::Members members) {
  std::vector<const Call*> calls;
  for (const auto& member : members) {
    calls.push_back(&static_cast<const CallMember<Call>&>(*member).call);
  }
  return kMake(calls);
}

const int32_t* Ints(const AnyBuffer& buffer) {
  return static_cast<const int32_t*>(buffer.untyped_data());
}

/// Fills in a call and sends it to its meeting. `fill(meeting, call)` returns
/// the bytes that the other ranks await from this one.
template <
    typename Call,
    StatusOr<std::unique_ptr<moe::Work>> (*kMake)(std::span<const Call* const>),
    typename Fill>
xla::ffi::Future Exchange(const Attributes& attributes, const AnyBuffer& keys,
                          const AnyBuffer& rank, Fill fill) {
  auto meeting = DecodeMeeting(keys, rank, attributes.op, attributes.axis);
  if (!meeting.ok()) return FailedFuture(meeting.status());
  auto member = std::make_unique<CallMember<Call>>();
  const Status status = fill(*meeting, member->call);
  if (!status.ok()) return FailedFuture(status.WithContext(meeting->op));
  return Arrive(*meeting, std::move(member), &MakeFrom<Call, kMake>);
}

xla::ffi::Future Dispatch(CpuExchange exchange, AnyBuffer keys, AnyBuffer rank,
                          AnyBuffer tokens, AnyBuffer expert_ids, Result rows,
                          Result group_sizes, Result wanted, Result slots) {
  const Attributes attributes = exchange.Named("dispatch");
  const auto fill = [&](moe::Meeting& meeting,
                        moe::DispatchCall& call) -> Status {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, meeting.num_ranks,
                                                  tokens, expert_ids, *rows));
    TB_RETURN_IF_ERROR(CheckPlan(sizes, *group_sizes, *wanted, *slots));
    call.config = sizes.config;
    call.tokens = tokens.untyped_data();
    call.expert_ids = Ints(expert_ids);
    call.rows = rows->untyped_data();
    call.group_sizes = static_cast<int32_t*>(group_sizes->untyped_data());
    call.wanted = static_cast<int32_t*>(wanted->untyped_data());
    call.slots = static_cast<int32_t*>(slots->untyped_data());
    moe::AdviseHugePages(call.rows, rows->size_bytes());
    moe::CountDispatch(call);
    meeting.size_bytes = tokens.size_bytes();
    return OkStatus();
  };
  return Exchange<moe::DispatchCall, &moe::MakeDispatch>(attributes, keys, rank,
                                                         fill);
}

/// The plan of a dispatch alone: what `Dispatch` returns but its rows.
xla::ffi::Future Plan(CpuPlan exchange, AnyBuffer keys, AnyBuffer rank,
                      AnyBuffer expert_ids, Result group_sizes, Result wanted,
                      Result slots) {
  const Attributes attributes = exchange.Named("dispatch");
  const auto fill = [&](moe::Meeting& meeting,
                        moe::DispatchCall& call) -> Status {
    TB_ASSIGN_OR_RETURN(const Sizes sizes,
                        DecodePlan(attributes, meeting.num_ranks, expert_ids,
                                   exchange.num_rows));
    TB_RETURN_IF_ERROR(CheckPlan(sizes, *group_sizes, *wanted, *slots));
    call.config = sizes.config;
    call.expert_ids = Ints(expert_ids);
    call.group_sizes = static_cast<int32_t*>(group_sizes->untyped_data());
    call.wanted = static_cast<int32_t*>(wanted->untyped_data());
    call.slots = static_cast<int32_t*>(slots->untyped_data());
    moe::CountDispatch(call);
    meeting.size_bytes = expert_ids.size_bytes();
    return OkStatus();
  };
  return Exchange<moe::DispatchCall, &moe::MakeDispatch>(attributes, keys, rank,
                                                         fill);
}

/// The rows of a planned dispatch, a result of their own: XLA lets what
/// follows write over them, which it never does with a part of a tuple.
xla::ffi::Future Deliver(CpuExchange exchange, AnyBuffer keys, AnyBuffer rank,
                         AnyBuffer tokens, AnyBuffer expert_ids,
                         AnyBuffer slots, AnyBuffer group_sizes, Result rows) {
  const Attributes attributes = exchange.Named("dispatch");
  const auto fill = [&](moe::Meeting& meeting,
                        moe::DeliverCall& call) -> Status {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, meeting.num_ranks,
                                                  tokens, expert_ids, *rows));
    TB_RETURN_IF_ERROR(CheckPlan(sizes, group_sizes, group_sizes, slots));
    call.config = sizes.config;
    call.tokens = tokens.untyped_data();
    call.expert_ids = Ints(expert_ids);
    call.slots = Ints(slots);
    call.group_sizes = Ints(group_sizes);
    call.rows = rows->untyped_data();
    moe::AdviseHugePages(call.rows, rows->size_bytes());
    meeting.size_bytes = tokens.size_bytes();
    return OkStatus();
  };
  return Exchange<moe::DeliverCall, &moe::MakeDeliver>(attributes, keys, rank,
                                                       fill);
}

/// Combine, and with `weights` null the transpose of dispatch.
xla::ffi::Future Sum(const Attributes& attributes, const AnyBuffer& keys,
                     const AnyBuffer& rank, const AnyBuffer& rows,
                     const AnyBuffer& expert_ids, const AnyBuffer& slots,
                     const AnyBuffer* weights, const AnyBuffer& sums) {
  const auto fill = [&](moe::Meeting& meeting,
                        moe::CombineCall& call) -> Status {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, meeting.num_ranks,
                                                  sums, expert_ids, rows));
    TB_ASSIGN_OR_RETURN(call.element, DecodeElement(rows));
    TB_RETURN_IF_ERROR(CheckSum(sizes, call.element, slots, weights));
    if (weights != nullptr) call.weights = weights->untyped_data();
    call.config = sizes.config;
    call.rows = rows.untyped_data();
    call.expert_ids = Ints(expert_ids);
    call.slots = Ints(slots);
    call.sums = sums.untyped_data();
    moe::AdviseHugePages(call.sums, sums.size_bytes());
    meeting.size_bytes = rows.size_bytes();
    return OkStatus();
  };
  return Exchange<moe::CombineCall, &moe::MakeCombine>(attributes, keys, rank,
                                                       fill);
}

xla::ffi::Future Combine(CpuExchange exchange, AnyBuffer keys, AnyBuffer rank,
                         AnyBuffer rows, AnyBuffer expert_ids, AnyBuffer slots,
                         AnyBuffer weights, Result sums) {
  return Sum(exchange.Named("combine"), keys, rank, rows, expert_ids, slots,
             &weights, *sums);
}

xla::ffi::Future DispatchGrad(CpuExchange exchange, AnyBuffer keys,
                              AnyBuffer rank, AnyBuffer rows,
                              AnyBuffer expert_ids, AnyBuffer slots,
                              Result sums) {
  return Sum(exchange.Named("dispatch's gradient"), keys, rank, rows,
             expert_ids, slots, nullptr, *sums);
}

xla::ffi::Future CombineGrad(CpuExchange exchange, AnyBuffer keys,
                             AnyBuffer rank, AnyBuffer sum_grads,
                             AnyBuffer rows, AnyBuffer expert_ids,
                             AnyBuffer slots, AnyBuffer weights,
                             AnyBuffer group_sizes, Result row_grads,
                             Result weight_grads) {
  const Attributes attributes = exchange.Named("combine's gradient");
  const auto fill = [&](moe::Meeting& meeting,
                        moe::CombineGradCall& call) -> Status {
    TB_ASSIGN_OR_RETURN(const Sizes sizes, Decode(attributes, meeting.num_ranks,
                                                  sum_grads, expert_ids, rows));
    TB_ASSIGN_OR_RETURN(call.element, DecodeElement(rows));
    TB_RETURN_IF_ERROR(CheckCombineGrad(sizes, call.element, rows, slots,
                                        weights, group_sizes, *row_grads,
                                        *weight_grads));
    call.config = sizes.config;
    call.sum_grads = sum_grads.untyped_data();
    call.rows = rows.untyped_data();
    call.expert_ids = Ints(expert_ids);
    call.slots = Ints(slots);
    call.weights = weights.untyped_data();
    call.group_sizes = Ints(group_sizes);
    call.row_grads = row_grads->untyped_data();
    call.weight_grads = weight_grads->untyped_data();
    moe::AdviseHugePages(call.row_grads, row_grads->size_bytes());
    meeting.size_bytes = sum_grads.size_bytes();
    return OkStatus();
  };
  return Exchange<moe::CombineGradCall, &moe::MakeCombineGrad>(attributes, keys,
                                                               rank, fill);
}

/// What every exchange begins with.
template <typename Attrs>
auto Bind() {
  return xla::ffi::Ffi::Bind()
      .Attrs<Attrs>()
      .template Arg<AnyBuffer>()   // keys
      .template Arg<AnyBuffer>();  // rank
}

XLA_FFI_DEFINE_HANDLER(kDispatch, Dispatch, BindDispatch(Bind<CpuExchange>()));
XLA_FFI_DEFINE_HANDLER(kPlan, Plan,
                       Bind<CpuPlan>()
                           .Arg<AnyBuffer>()  // expert_ids
                           .Ret<AnyBuffer>()  // group_sizes
                           .Ret<AnyBuffer>()  // wanted
                           .Ret<AnyBuffer>()  // slots
);
XLA_FFI_DEFINE_HANDLER(kDeliver, Deliver,
                       Bind<CpuExchange>()
                           .Arg<AnyBuffer>()  // tokens
                           .Arg<AnyBuffer>()  // expert_ids
                           .Arg<AnyBuffer>()  // slots
                           .Arg<AnyBuffer>()  // group_sizes
                           .Ret<AnyBuffer>()  // rows
);
XLA_FFI_DEFINE_HANDLER(kCombine, Combine, BindCombine(Bind<CpuExchange>()));
XLA_FFI_DEFINE_HANDLER(kDispatchGrad, DispatchGrad,
                       BindDispatchGrad(Bind<CpuExchange>()));
XLA_FFI_DEFINE_HANDLER(kCombineGrad, CombineGrad,
                       BindCombineGrad(Bind<CpuExchange>()));

}  // namespace

std::vector<Target> MoeExchangeTargets() {
  return {
      {"turbobus_moe_dispatch", kDispatch},
      {"turbobus_moe_dispatch_plan", kPlan},
      {"turbobus_moe_dispatch_rows", kDeliver},
      {"turbobus_moe_dispatch_grad", kDispatchGrad},
      {"turbobus_moe_combine", kCombine},
      {"turbobus_moe_combine_grad", kCombineGrad},
  };
}

}  // namespace turbobus::ffi

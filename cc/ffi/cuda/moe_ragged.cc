#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "ffi/cuda/moe_calls.h"
#include "ffi/cuda/targets.h"
#include "ffi/error.h"
#include "moe/cuda/events.h"
#include "moe/cuda/gpu_ragged.h"

// `ragged_all_to_all` on GPUs, and its transpose. Operands: the caller's own
// table, which peers read where it lies, and rows.

namespace turbobus::ffi {
namespace {

using moe::cuda::FromCuda;

using moe::cuda::Caller;
using moe::cuda::DType;
using moe::cuda::GpuRagged;
using xla::ffi::Error;
using Result = xla::ffi::Result<AnyBuffer>;
using Ints64 = xla::ffi::Span<const int64_t>;

constexpr std::string_view kOp = "ragged_all_to_all";

/// What a handler gets from XLA beside buffers.
struct Call {
  cudaStream_t stream = nullptr;
  int32_t device = 0;
  int64_t run_id = 0;
  xla::ffi::ScratchAllocator* scratch = nullptr;
  GpuExchange exchange;

  StatusOr<uint8_t*> Allocate(int64_t size_bytes) const {
    if (size_bytes == 0) return nullptr;
    const auto memory = scratch->Allocate(size_bytes);
    if (memory.has_value()) return static_cast<uint8_t*>(*memory);
    return ResourceExhausted("no " + std::to_string(size_bytes) +
                             " bytes of device memory for scratch");
  }
};

/// A buffer [batches, rows, ...].
struct Rows {
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;

  int64_t size_bytes() const { return num_batches * num_rows * row_bytes; }
};

StatusOr<Rows> DecodeRows(const AnyBuffer& buffer, std::string_view name) {
  const auto dims = buffer.dimensions();
  if (dims.size() < 2) {
    return InvalidArgument(std::string(name) + " must be [batches, rows, ...]");
  }
  Rows rows{.num_batches = dims[0], .num_rows = dims[1]};
  rows.row_bytes =
      static_cast<int64_t>(xla::ffi::ByteWidth(buffer.element_type()));
  for (size_t i = 2; i < dims.size(); ++i) rows.row_bytes *= dims[i];
  return rows;
}

StatusOr<DType> DecodeDType(const AnyBuffer& rows) {
  switch (rows.element_type()) {
    case xla::ffi::F64:
    case xla::ffi::C128:
      return DType::kF64;
    case xla::ffi::F32:
    case xla::ffi::C64:
      return DType::kF32;
    case xla::ffi::F16:
      return DType::kF16;
    case xla::ffi::BF16:
      return DType::kBF16;
    default:
      return InvalidArgument("rows of this type cannot be summed");
  }
}

/// Reads what both directions have: `operand` and `output` are the shapes of
/// the forward call.
Status DecodeSizes(const Caller& caller, const AnyBuffer& table,
                   const Rows& operand, const Rows& output, GpuRagged& call) {
  if (operand.num_batches != output.num_batches ||
      operand.row_bytes != output.row_bytes) {
    return InvalidArgument("operand and output must agree on batches and rows");
  }
  const auto dims = table.dimensions();
  if (table.element_type() != xla::ffi::S32 || dims.size() != 3 ||
      (dims[0] != 1 && dims[0] != operand.num_batches) || dims[1] != 4 ||
      dims[2] < 1 || dims[2] % caller.num_ranks != 0) {
    return InvalidArgument(
        "table must be s32[1 or batches, 4, a multiple of the ranks]");
  }
  if (dims[2] > moe::cuda::kMaxRaggedSlices) {
    return Unimplemented(std::to_string(dims[2]) + " slices, at most " +
                         std::to_string(moe::cuda::kMaxRaggedSlices) +
                         " on GPUs");
  }
  call.sizes = {.rank = caller.rank,
                .num_ranks = caller.num_ranks,
                .num_slices = static_cast<int>(dims[2]),
                .num_batches = operand.num_batches,
                .num_tables = dims[0],
                .operand_rows = operand.num_rows,
                .output_rows = output.num_rows,
                .row_bytes = operand.row_bytes};
  call.table = static_cast<const int32_t*>(table.untyped_data());
  return OkStatus();
}

/// Prepares a forward call: afterwards the result holds `output` (null: zeros,
/// which the kernel makes), and peers may write into it while the operand is
/// read.
Status PreparePush(const Call& from, const Caller& caller,
                   const AnyBuffer& table, const AnyBuffer& operand,
                   const AnyBuffer* output, const AnyBuffer& result,
                   GpuRagged& call) {
  TB_ASSIGN_OR_RETURN(const Rows in, DecodeRows(operand, "operand"));
  TB_ASSIGN_OR_RETURN(const Rows out, DecodeRows(result, "output"));
  TB_RETURN_IF_ERROR(DecodeSizes(caller, table, in, out, call));
  call.source = static_cast<const uint8_t*>(operand.untyped_data());
  call.result = static_cast<uint8_t*>(result.untyped_data());
  if (call.source < call.result + out.size_bytes() &&
      call.result < call.source + in.size_bytes()) {
    // XLA has put the operand where the result goes.
    TB_ASSIGN_OR_RETURN(uint8_t* const copy, from.Allocate(in.size_bytes()));
    TB_RETURN_IF_ERROR(FromCuda(
        cudaMemcpyAsync(copy, call.source, static_cast<size_t>(in.size_bytes()),
                        cudaMemcpyDeviceToDevice, from.stream),
        "copy of the operand"));
    call.source = copy;
  }
  call.is_onto_zeros = output == nullptr;
  if (output != nullptr && output->untyped_data() != result.untyped_data() &&
      out.size_bytes() > 0) {
    TB_RETURN_IF_ERROR(
        FromCuda(cudaMemcpyAsync(call.result, output->untyped_data(),
                                 static_cast<size_t>(out.size_bytes()),
                                 cudaMemcpyDeviceToDevice, from.stream),
                 "copy of the output"));
  }
  TB_ASSIGN_OR_RETURN(
      call.scratch,
      from.Allocate(moe::cuda::RaggedPushScratchBytes(call.sizes)));
  return OkStatus();
}

Status PrepareSum(const Call& from, const Caller& caller,
                  const AnyBuffer& table, const AnyBuffer& cotangent,
                  const AnyBuffer& result, GpuRagged& call) {
  TB_ASSIGN_OR_RETURN(const Rows out, DecodeRows(cotangent, "cotangent"));
  TB_ASSIGN_OR_RETURN(const Rows in, DecodeRows(result, "result"));
  TB_RETURN_IF_ERROR(DecodeSizes(caller, table, in, out, call));
  TB_ASSIGN_OR_RETURN(call.dtype, DecodeDType(cotangent));
  call.source = static_cast<const uint8_t*>(cotangent.untyped_data());
  call.result = static_cast<uint8_t*>(result.untyped_data());
  TB_ASSIGN_OR_RETURN(
      call.scratch,
      from.Allocate(moe::cuda::RaggedSumScratchBytes(call.sizes)));
  return OkStatus();
}

/// Runs one direction: `prepare(caller, call)`, then `run(caller, call)`. What
/// fails before the meeting is told to the ranks that wait there.
template <typename Prepare>
Status Run(const Call& from, Prepare prepare,
           Status (*run)(const Caller&, const GpuRagged&)) {
  const GpuContext context = {.stream = from.stream,
                              .device = from.device,
                              .run_id = from.run_id,
                              .allocate = nullptr};  // Not needed here.
  TB_ASSIGN_OR_RETURN(const Caller caller,
                      FindCaller(context, from.exchange, kOp));
  GpuRagged call;
  if (const Status status = prepare(caller, call); !status.ok()) {
    caller.meeting->Fail(
        caller.key,
        {.op = caller.op, .rank = caller.rank, .num_ranks = caller.num_ranks},
        status);
    return status.WithContext(caller.op);
  }
  const auto& sizes = call.sizes;
  const int64_t num_results =
      call.dtype == DType::kOther ? sizes.output_rows : sizes.operand_rows;
  if (sizes.num_batches * num_results * sizes.row_bytes == 0) return OkStatus();
  return run(caller, call);
}

Error Forward(cudaStream_t stream, int32_t device, xla::ffi::RunId run_id,
              xla::ffi::ScratchAllocator scratch, AnyBuffer table,
              AnyBuffer operand, AnyBuffer output, Result result,
              std::string_view axis, Ints64 devices, Ints64 ranks,
              Ints64 groups) {
  const Call from = {
      stream,
      device,
      run_id.run_id,
      &scratch,
      {.axis = axis, .devices = devices, .ranks = ranks, .groups = groups}};
  return ToError(Run(
      from,
      [&](const Caller& caller, GpuRagged& call) {
        return PreparePush(from, caller, table, operand, &output, *result,
                           call);
      },
      moe::cuda::RunRaggedPush));
}

Error ForwardOntoZeros(cudaStream_t stream, int32_t device,
                       xla::ffi::RunId run_id,
                       xla::ffi::ScratchAllocator scratch, AnyBuffer table,
                       AnyBuffer operand, Result result, std::string_view axis,
                       Ints64 devices, Ints64 ranks, Ints64 groups) {
  const Call from = {
      stream,
      device,
      run_id.run_id,
      &scratch,
      {.axis = axis, .devices = devices, .ranks = ranks, .groups = groups}};
  return ToError(Run(
      from,
      [&](const Caller& caller, GpuRagged& call) {
        return PreparePush(from, caller, table, operand, nullptr, *result,
                           call);
      },
      moe::cuda::RunRaggedPush));
}

Error Transpose(cudaStream_t stream, int32_t device, xla::ffi::RunId run_id,
                xla::ffi::ScratchAllocator scratch, AnyBuffer table,
                AnyBuffer cotangent, Result result, std::string_view axis,
                Ints64 devices, Ints64 ranks, Ints64 groups) {
  const Call from = {
      stream,
      device,
      run_id.run_id,
      &scratch,
      {.axis = axis, .devices = devices, .ranks = ranks, .groups = groups}};
  return ToError(Run(
      from,
      [&](const Caller& caller, GpuRagged& call) {
        return PrepareSum(from, caller, table, cotangent, *result, call);
      },
      moe::cuda::RunRaggedSum));
}

#define TB_RAGGED_CONTEXT                            \
  xla::ffi::Ffi::Bind()                              \
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>() \
      .Ctx<xla::ffi::DeviceOrdinal>()                \
      .Ctx<xla::ffi::RunId>()                        \
      .Ctx<xla::ffi::ScratchAllocator>()
#define TB_RAGGED_ATTRIBUTES      \
  .Attr<std::string_view>("axis") \
      .Attr<Ints64>("devices")    \
      .Attr<Ints64>("ranks")      \
      .Attr<Ints64>("groups")

XLA_FFI_DEFINE_HANDLER(kForward, Forward,
                       TB_RAGGED_CONTEXT
                           .Arg<AnyBuffer>()  // table
                           .Arg<AnyBuffer>()  // operand
                           .Arg<AnyBuffer>()  // output
                           .Ret<AnyBuffer>()  // result
                       TB_RAGGED_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER(kForwardOntoZeros, ForwardOntoZeros,
                       TB_RAGGED_CONTEXT
                           .Arg<AnyBuffer>()  // table
                           .Arg<AnyBuffer>()  // operand
                           .Ret<AnyBuffer>()  // result
                       TB_RAGGED_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER(kTranspose, Transpose,
                       TB_RAGGED_CONTEXT
                           .Arg<AnyBuffer>()  // table
                           .Arg<AnyBuffer>()  // cotangent
                           .Ret<AnyBuffer>()  // result
                       TB_RAGGED_ATTRIBUTES);

#undef TB_RAGGED_CONTEXT
#undef TB_RAGGED_ATTRIBUTES

}  // namespace

std::vector<Target> CudaMoeRaggedTargets() {
  return {{"turbobus_ragged_all_to_all", kForward},
          {"turbobus_ragged_all_to_all_onto_zeros", kForwardOntoZeros},
          {"turbobus_ragged_all_to_all_transpose", kTranspose}};
}

}  // namespace turbobus::ffi

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "ffi/cuda/for_peers.h"
#include "ffi/cuda/moe_calls.h"
#include "ffi/cuda/nvtx_range.h"
#include "ffi/cuda/targets.h"
#include "ffi/error.h"
#include "moe/cuda/events.h"
#include "moe/cuda/gpu_ragged.h"

// `ragged_all_to_all` on GPUs, and its transpose. Operands: the caller's own
// table, which peers read where it lies, and rows.

namespace turbobus::ffi {

/// The attributes of a ragged exchange on GPUs: as in `GpuExchange`.
struct RaggedExchange {
  std::string_view axis;
  xla::ffi::Span<const int64_t> devices;
  xla::ffi::Span<const int64_t> ranks;
  xla::ffi::Span<const int64_t> groups;

  GpuExchange Whole() const {
    return {.axis = axis, .devices = devices, .ranks = ranks, .groups = groups};
  }
};

}  // namespace turbobus::ffi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    turbobus::ffi::RaggedExchange,
    xla::ffi::StructMember<std::string_view>("axis"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("devices"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("ranks"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));

namespace turbobus::ffi {
namespace {

using moe::cuda::FromCuda;

using moe::cuda::Caller;
using moe::cuda::DType;
using moe::cuda::GpuRagged;
using xla::ffi::Error;
using Result = xla::ffi::Result<AnyBuffer>;

constexpr std::string_view kOp = "ragged_all_to_all";

StatusOr<uint8_t*> Allocate(const GpuContext& context, int64_t size_bytes) {
  if (size_bytes == 0) return nullptr;
  TB_ASSIGN_OR_RETURN(void* const memory, context.allocate(size_bytes));
  return static_cast<uint8_t*>(memory);
}

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
Status DecodeSizes(const GpuContext& context, const Caller& caller,
                   const AnyBuffer& table, const Rows& operand,
                   const Rows& output, GpuRagged& call) {
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
  TB_ASSIGN_OR_RETURN(const DeviceBytes readable,
                      ReadableByPeers(context, caller, table, "table"));
  call.table = reinterpret_cast<const int32_t*>(readable.data);
  return OkStatus();
}

/// Prepares a forward call: afterwards the result holds `output` (null: zeros,
/// which the kernel makes), and peers may write into it while the operand is
/// read.
Status PreparePush(const GpuContext& context, const Caller& caller,
                   const AnyBuffer& table, const AnyBuffer& operand,
                   const AnyBuffer* output, const AnyBuffer& result,
                   GpuRagged& call) {
  TB_ASSIGN_OR_RETURN(const Rows in, DecodeRows(operand, "operand"));
  TB_ASSIGN_OR_RETURN(const Rows out, DecodeRows(result, "output"));
  TB_RETURN_IF_ERROR(DecodeSizes(context, caller, table, in, out, call));
  TB_RETURN_IF_ERROR(CheckWritableByPeers(caller, result, "output"));
  call.source = static_cast<const uint8_t*>(operand.untyped_data());
  call.result = static_cast<uint8_t*>(result.untyped_data());
  if (call.source < call.result + out.size_bytes() &&
      call.result < call.source + in.size_bytes()) {
    // XLA has put the operand where the result goes.
    TB_ASSIGN_OR_RETURN(uint8_t* const copy,
                        Allocate(context, in.size_bytes()));
    TB_RETURN_IF_ERROR(FromCuda(
        cudaMemcpyAsync(copy, call.source, static_cast<size_t>(in.size_bytes()),
                        cudaMemcpyDeviceToDevice, context.stream),
        "copy of the operand"));
    call.source = copy;
  }
  call.is_onto_zeros = output == nullptr;
  if (output != nullptr && output->untyped_data() != result.untyped_data() &&
      out.size_bytes() > 0) {
    TB_RETURN_IF_ERROR(
        FromCuda(cudaMemcpyAsync(call.result, output->untyped_data(),
                                 static_cast<size_t>(out.size_bytes()),
                                 cudaMemcpyDeviceToDevice, context.stream),
                 "copy of the output"));
  }
  TB_ASSIGN_OR_RETURN(
      call.scratch,
      Allocate(context, moe::cuda::RaggedPushScratchBytes(call.sizes)));
  return OkStatus();
}

Status PrepareSum(const GpuContext& context, const Caller& caller,
                  const AnyBuffer& table, const AnyBuffer& cotangent,
                  const AnyBuffer& result, GpuRagged& call) {
  TB_ASSIGN_OR_RETURN(const Rows out, DecodeRows(cotangent, "cotangent"));
  TB_ASSIGN_OR_RETURN(const Rows in, DecodeRows(result, "result"));
  TB_RETURN_IF_ERROR(DecodeSizes(context, caller, table, in, out, call));
  TB_ASSIGN_OR_RETURN(call.dtype, DecodeDType(cotangent));
  TB_ASSIGN_OR_RETURN(const DeviceBytes readable,
                      ReadableByPeers(context, caller, cotangent, "cotangent"));
  call.source = readable.data;
  call.result = static_cast<uint8_t*>(result.untyped_data());
  TB_ASSIGN_OR_RETURN(
      call.scratch,
      Allocate(context, moe::cuda::RaggedSumScratchBytes(call.sizes)));
  return OkStatus();
}

/// Runs one direction: `prepare(caller, call)`, then `run(caller, call)`. What
/// fails before the meeting is told to the ranks that wait there.
template <typename Prepare>
Error Run(const GpuContext& context, const RaggedExchange& exchange,
          Prepare prepare, Status (*run)(const Caller&, const GpuRagged&)) {
  const NvtxRange range({"turbobus ", kOp, " over axis ", exchange.axis});
  const auto status = [&]() -> Status {
    TB_ASSIGN_OR_RETURN(const Caller caller,
                        FindCaller(context, exchange.Whole(), kOp));
    GpuRagged call;
    call.allocate = context.allocate;
    if (const Status status = prepare(caller, call); !status.ok()) {
      return TellOthers(caller, status);
    }
    const auto& sizes = call.sizes;
    const int64_t num_results =
        call.dtype == DType::kOther ? sizes.output_rows : sizes.operand_rows;
    if (sizes.num_batches * num_results * sizes.row_bytes == 0) {
      return OkStatus();
    }
    return run(caller, call);
  };
  return ToError(status());
}

Error Forward(cudaStream_t stream, int32_t device, xla::ffi::RunId run_id,
              xla::ffi::ScratchAllocator scratch, RaggedExchange exchange,
              AnyBuffer table, AnyBuffer operand, AnyBuffer output,
              Result result) {
  const GpuContext context = OnStream(stream, device, run_id, scratch);
  return Run(
      context, exchange,
      [&](const Caller& caller, GpuRagged& call) {
        return PreparePush(context, caller, table, operand, &output, *result,
                           call);
      },
      moe::cuda::RunRaggedPush);
}

Error ForwardOntoZeros(cudaStream_t stream, int32_t device,
                       xla::ffi::RunId run_id,
                       xla::ffi::ScratchAllocator scratch,
                       RaggedExchange exchange, AnyBuffer table,
                       AnyBuffer operand, Result result) {
  const GpuContext context = OnStream(stream, device, run_id, scratch);
  return Run(
      context, exchange,
      [&](const Caller& caller, GpuRagged& call) {
        return PreparePush(context, caller, table, operand, nullptr, *result,
                           call);
      },
      moe::cuda::RunRaggedPush);
}

Error Transpose(cudaStream_t stream, int32_t device, xla::ffi::RunId run_id,
                xla::ffi::ScratchAllocator scratch, RaggedExchange exchange,
                AnyBuffer table, AnyBuffer cotangent, Result result) {
  const GpuContext context = OnStream(stream, device, run_id, scratch);
  return Run(
      context, exchange,
      [&](const Caller& caller, GpuRagged& call) {
        return PrepareSum(context, caller, table, cotangent, *result, call);
      },
      moe::cuda::RunRaggedSum);
}

/// What every handler here begins with.
auto Bind() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Ctx<xla::ffi::RunId>()
      .Ctx<xla::ffi::ScratchAllocator>()
      .Attrs<RaggedExchange>();
}

XLA_FFI_DEFINE_HANDLER(kForward, Forward,
                       Bind()
                           .Arg<AnyBuffer>()  // table
                           .Arg<AnyBuffer>()  // operand
                           .Arg<AnyBuffer>()  // output
                           .Ret<AnyBuffer>()  // result
);

XLA_FFI_DEFINE_HANDLER(kForwardOntoZeros, ForwardOntoZeros,
                       Bind()
                           .Arg<AnyBuffer>()  // table
                           .Arg<AnyBuffer>()  // operand
                           .Ret<AnyBuffer>()  // result
);

XLA_FFI_DEFINE_HANDLER(kTranspose, Transpose,
                       Bind()
                           .Arg<AnyBuffer>()  // table
                           .Arg<AnyBuffer>()  // cotangent
                           .Ret<AnyBuffer>()  // result
);

}  // namespace

std::vector<Target> CudaMoeRaggedTargets() {
  return {{"turbobus_ragged_all_to_all", kForward},
          {"turbobus_ragged_all_to_all_onto_zeros", kForwardOntoZeros},
          {"turbobus_ragged_all_to_all_transpose", kTranspose}};
}

}  // namespace turbobus::ffi

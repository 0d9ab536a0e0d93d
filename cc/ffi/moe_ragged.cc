#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "ffi/error.h"
#include "ffi/moe_call.h"
#include "ffi/targets.h"
#include "moe/ragged_exchange.h"
#include "moe/rendezvous.h"

// `jax.lax.ragged_all_to_all` on CPU devices, and its transpose.

namespace turbobus::ffi {
namespace {

constexpr std::string_view kOp = "ragged_all_to_all";

/// `moe::RaggedMember` has what the exchange needs, `FutureMember` what XLA
/// needs; this one is both, the second by delegation.
class RaggedFuture : public moe::RaggedMember {
 public:
  xla::ffi::Future future() { return xla::ffi::Future(promise_); }

  void Done(const Status& status) override {
    if (status.ok()) {
      promise_.SetAvailable();
    } else {
      promise_.SetError(ToError(status));
    }
  }

  /// Where XLA put the operand and the result into one place: a copy of the
  /// operand, which peers read while the result is written.
  std::vector<std::byte> private_source;

 private:
  xla::ffi::Promise promise_;
};

/// Adds a "[batches, rows, ...]" buffer's sizes to `shape`.
struct RowBuffer {
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
};

StatusOr<RowBuffer> DecodeRows(xla::ffi::DataType type,
                               xla::ffi::Span<const int64_t> dims,
                               std::string_view name) {
  if (dims.size() < 2) {
    return InvalidArgument(std::string(kOp) + ": " + std::string(name) +
                           " must be [batches, rows, ...]");
  }
  RowBuffer result{.num_batches = dims[0], .num_rows = dims[1]};
  result.row_bytes = static_cast<int64_t>(xla::ffi::ByteWidth(type));
  for (size_t i = 2; i < dims.size(); ++i) result.row_bytes *= dims[i];
  return result;
}

StatusOr<moe::RowElement> DecodeElement(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::F64:
    case xla::ffi::C128:
      return moe::RowElement::kFloat64;
    case xla::ffi::F32:
    case xla::ffi::C64:
      return moe::RowElement::kFloat32;
    case xla::ffi::F16:
      return moe::RowElement::kFloat16;
    case xla::ffi::BF16:
      return moe::RowElement::kBfloat16;
    default:
      return InvalidArgument(std::string(kOp) +
                             ": rows of this type cannot be summed");
  }
}

/// Reads `tables` s32[num_tables, num_ranks, 4, num_slices] into `member`.
Status DecodeTables(const xla::ffi::AnyBuffer& tables,
                    const moe::Meeting& meeting, moe::RaggedMember& member) {
  const auto dims = tables.dimensions();
  moe::RaggedShape& shape = member.shape;
  if (tables.element_type() != xla::ffi::S32 || dims.size() != 4 ||
      dims[1] != meeting.num_ranks || dims[2] != 4 || dims[3] < 1 ||
      dims[3] % dims[1] != 0 ||
      (dims[0] != 1 && dims[0] != shape.num_batches)) {
    return InvalidArgument(std::string(kOp) +
                           ": tables must be s32[1 or batches, num_ranks, 4, a "
                           "multiple of num_ranks]");
  }
  shape.num_ranks = meeting.num_ranks;
  shape.num_tables = dims[0];
  shape.num_slices = static_cast<int>(dims[3]);
  member.tables = {static_cast<const int32_t*>(tables.untyped_data()),
                   tables.element_count()};
  return OkStatus();
}

xla::ffi::Future Meet(moe::Meeting meeting,
                      std::unique_ptr<RaggedFuture> member) {
  const moe::RaggedShape& shape = member->shape;
  meeting.size_bytes = shape.num_batches * shape.operand_rows * shape.row_bytes;
  xla::ffi::Future future = member->future();
  moe::Rendezvous::Process().Arrive(meeting, std::move(member),
                                    moe::MakeRaggedWork);
  return future;
}

bool Overlap(const std::byte* a, int64_t a_bytes, const std::byte* b,
             int64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

StatusOr<xla::ffi::Future> ForwardImpl(const xla::ffi::AnyBuffer& keys,
                                       const xla::ffi::AnyBuffer& rank,
                                       const xla::ffi::AnyBuffer& tables,
                                       const xla::ffi::AnyBuffer& operand,
                                       const xla::ffi::AnyBuffer& output,
                                       xla::ffi::AnyBuffer& result,
                                       std::string_view axis) {
  TB_ASSIGN_OR_RETURN(const moe::Meeting meeting,
                      DecodeMeeting(keys, rank, kOp, axis));
  TB_ASSIGN_OR_RETURN(
      const RowBuffer in,
      DecodeRows(operand.element_type(), operand.dimensions(), "operand"));
  TB_ASSIGN_OR_RETURN(
      const RowBuffer out,
      DecodeRows(result.element_type(), result.dimensions(), "output"));
  if (in.num_batches != out.num_batches || in.row_bytes != out.row_bytes) {
    return InvalidArgument(
        std::string(kOp) +
        ": operand and output must agree on batches and rows");
  }
  auto member = std::make_unique<RaggedFuture>();
  member->shape = {.direction = moe::RaggedDirection::kForward,
                   .num_batches = in.num_batches,
                   .operand_rows = in.num_rows,
                   .output_rows = out.num_rows,
                   .row_bytes = in.row_bytes};
  TB_RETURN_IF_ERROR(DecodeTables(tables, meeting, *member));

  const int64_t in_bytes = in.num_batches * in.num_rows * in.row_bytes;
  const int64_t out_bytes = out.num_batches * out.num_rows * out.row_bytes;
  member->source = static_cast<const std::byte*>(operand.untyped_data());
  member->result = static_cast<std::byte*>(result.untyped_data());
  if (Overlap(member->source, in_bytes, member->result, out_bytes)) {
    member->private_source.assign(member->source, member->source + in_bytes);
    member->source = member->private_source.data();
  }
  if (output.untyped_data() != result.untyped_data() && out_bytes > 0) {
    std::memmove(member->result, output.untyped_data(),
                 static_cast<size_t>(out_bytes));
  }
  return Meet(meeting, std::move(member));
}

StatusOr<xla::ffi::Future> TransposeImpl(const xla::ffi::AnyBuffer& keys,
                                         const xla::ffi::AnyBuffer& rank,
                                         const xla::ffi::AnyBuffer& tables,
                                         const xla::ffi::AnyBuffer& cotangent,
                                         xla::ffi::AnyBuffer& result,
                                         std::string_view axis) {
  TB_ASSIGN_OR_RETURN(const moe::Meeting meeting,
                      DecodeMeeting(keys, rank, kOp, axis));
  TB_ASSIGN_OR_RETURN(const RowBuffer in,
                      DecodeRows(cotangent.element_type(),
                                 cotangent.dimensions(), "cotangent"));
  TB_ASSIGN_OR_RETURN(
      const RowBuffer out,
      DecodeRows(result.element_type(), result.dimensions(), "result"));
  if (in.num_batches != out.num_batches || in.row_bytes != out.row_bytes) {
    return InvalidArgument(
        std::string(kOp) +
        ": cotangent and result must agree on batches and rows");
  }
  auto member = std::make_unique<RaggedFuture>();
  member->shape = {.direction = moe::RaggedDirection::kTranspose,
                   .num_batches = in.num_batches,
                   .operand_rows = out.num_rows,
                   .output_rows = in.num_rows,
                   .row_bytes = in.row_bytes};
  TB_ASSIGN_OR_RETURN(member->shape.element,
                      DecodeElement(cotangent.element_type()));
  TB_RETURN_IF_ERROR(DecodeTables(tables, meeting, *member));
  member->source = static_cast<const std::byte*>(cotangent.untyped_data());
  member->result = static_cast<std::byte*>(result.untyped_data());
  return Meet(meeting, std::move(member));
}

xla::ffi::Future FutureOrError(StatusOr<xla::ffi::Future> future) {
  return future.ok() ? std::move(future).value()
                     : FailedFuture(future.status());
}

xla::ffi::Future Forward(xla::ffi::AnyBuffer keys, xla::ffi::AnyBuffer rank,
                         xla::ffi::AnyBuffer tables,
                         xla::ffi::AnyBuffer operand,
                         xla::ffi::AnyBuffer output,
                         xla::ffi::Result<xla::ffi::AnyBuffer> result,
                         std::string_view axis) {
  return FutureOrError(
      ForwardImpl(keys, rank, tables, operand, output, *result, axis));
}

xla::ffi::Future Transpose(xla::ffi::AnyBuffer keys, xla::ffi::AnyBuffer rank,
                           xla::ffi::AnyBuffer tables,
                           xla::ffi::AnyBuffer cotangent,
                           xla::ffi::Result<xla::ffi::AnyBuffer> result,
                           std::string_view axis) {
  return FutureOrError(
      TransposeImpl(keys, rank, tables, cotangent, *result, axis));
}

XLA_FFI_DEFINE_HANDLER(kForward, Forward,
                       xla::ffi::Ffi::Bind()
                           .Arg<xla::ffi::AnyBuffer>()  // keys
                           .Arg<xla::ffi::AnyBuffer>()  // rank
                           .Arg<xla::ffi::AnyBuffer>()  // tables
                           .Arg<xla::ffi::AnyBuffer>()  // operand
                           .Arg<xla::ffi::AnyBuffer>()  // output
                           .Ret<xla::ffi::AnyBuffer>()  // result
                           .Attr<std::string_view>("axis"));

XLA_FFI_DEFINE_HANDLER(kTranspose, Transpose,
                       xla::ffi::Ffi::Bind()
                           .Arg<xla::ffi::AnyBuffer>()  // keys
                           .Arg<xla::ffi::AnyBuffer>()  // rank
                           .Arg<xla::ffi::AnyBuffer>()  // tables
                           .Arg<xla::ffi::AnyBuffer>()  // cotangent
                           .Ret<xla::ffi::AnyBuffer>()  // result
                           .Attr<std::string_view>("axis"));

}  // namespace

std::vector<Target> MoeRaggedTargets() {
  return {{"turbobus_ragged_all_to_all", kForward},
          {"turbobus_ragged_all_to_all_transpose", kTranspose}};
}

}  // namespace turbobus::ffi

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "ffi/error.h"
#include "ffi/offload_buffer.h"
#include "ffi/outcome.h"
#include "ffi/targets.h"
#include "offload/in_flight.h"
#include "offload/layout.h"
#include "offload/staged_transfer.h"
#include "offload/transfer.h"
#include "topo/path.h"
#include "xla/ffi/api/ffi.h"

// The handlers of docs/ffi.md for CPU devices, where host and device memory are
// both plain memory: kinds cannot be wrong here, aliases and sizes can.

namespace turbobus::ffi {
namespace {

using offload::InFlight;
using offload::Piece;
using offload::ProcessInFlight;
using offload::StagedTransfer;
using offload::Transfer;
using topo::Direction;
using xla::ffi::AnyBuffer;
using xla::ffi::RunId;
using Pieces = StatusOr<std::vector<Piece>>;
using Result = xla::ffi::Result<AnyBuffer>;

bool IsShared(AnyBuffer a, AnyBuffer b) {
  return a.untyped_data() == b.untyped_data();
}

std::byte* Bytes(AnyBuffer buffer) {
  return static_cast<std::byte*>(buffer.untyped_data());
}

/// Finished when the transfer is; `after` runs first, and only on success.
Outcome Await(Transfer& transfer, std::function<void()> after = [] {}) {
  if (const auto outcome = transfer.outcome()) {
    if (outcome->ok()) after();
    return *outcome;
  }
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  transfer.OnDone(
      [promise, after = std::move(after)](const Status& status) mutable {
        if (status.ok()) {
          after();
          promise.SetAvailable();
        } else {
          promise.SetError(ToError(status));
        }
      });
  return future;
}

/// What is to be moved.

Pieces WholePieces(std::string_view call, AnyBuffer src, AnyBuffer dst) {
  TB_RETURN_IF_ERROR(CheckSameType(call, "source", src, "result", dst));
  TB_ASSIGN_OR_RETURN(const int64_t size_bytes, SizeBytes(src));
  return std::vector<Piece>{
      {src.untyped_data(), dst.untyped_data(), size_bytes}};
}

Pieces IntoPieces(std::string_view call, AnyBuffer src, AnyBuffer out,
                  AnyBuffer dst) {
  TB_RETURN_IF_ERROR(CheckSameType(call, "out", out, "result", dst));
  return WholePieces(call, src, dst);
}

/// The pieces between a row in a stack and the row by itself.
std::vector<Piece> RowPieces(const offload::RowSlice& slice, std::byte* stack,
                             std::byte* row, Direction direction) {
  std::vector<Piece> pieces;
  pieces.reserve(slice.num_pieces);
  for (int64_t p = 0; p < slice.num_pieces; ++p) {
    std::byte* src = stack + slice.offset_bytes + p * slice.stride_bytes;
    std::byte* dst = row + p * slice.piece_bytes;
    if (direction == Direction::kD2h) std::swap(src, dst);
    pieces.push_back({src, dst, slice.piece_bytes});
  }
  return pieces;
}

StatusOr<offload::RowSlice> FindRow(std::string_view call, AnyBuffer stack,
                                    AnyBuffer index, int64_t axis,
                                    AnyBuffer row) {
  TB_RETURN_IF_ERROR(CheckIndex(call, index));
  int32_t value = 0;
  std::memcpy(&value, index.untyped_data(), sizeof(value));
  return CheckRow(call, stack, value, axis, row);
}

Pieces FetchPieces(std::string_view call, AnyBuffer stack, AnyBuffer index,
                   AnyBuffer row, int64_t axis) {
  TB_ASSIGN_OR_RETURN(const offload::RowSlice slice,
                      FindRow(call, stack, index, axis, row));
  return RowPieces(slice, Bytes(stack), Bytes(row), Direction::kH2d);
}

/// Where the stack is not the result, copies it there first.
Pieces StorePieces(std::string_view call, AnyBuffer stack, AnyBuffer index,
                   AnyBuffer row, AnyBuffer result, int64_t axis) {
  TB_RETURN_IF_ERROR(CheckSameType(call, "stack", stack, "result", result));
  TB_ASSIGN_OR_RETURN(const offload::RowSlice slice,
                      FindRow(call, stack, index, axis, row));
  if (!IsShared(stack, result)) {
    TB_ASSIGN_OR_RETURN(const int64_t size_bytes, SizeBytes(stack));
    offload::CopyDirectly({{Bytes(stack), Bytes(result), size_bytes}});
  }
  return RowPieces(slice, Bytes(result), Bytes(row), Direction::kD2h);
}

/// How it is moved: at once, or in two halves.

Outcome Move(Direction direction, int device, Pieces pieces) {
  if (!pieces.ok()) return pieces.status();
  return Await(*Transfer::Start(direction, device, *std::move(pieces)));
}

Outcome Launch(Direction direction, int device, RunId run, Pieces pieces,
               AnyBuffer result) {
  if (!pieces.ok()) return pieces.status();
  // Empty buffers may share an address, and have nothing to wait for.
  if (result.element_count() == 0) return OkStatus();
  ProcessInFlight().Insert(
      device, result.untyped_data(), run.run_id,
      StagedTransfer::Start(direction, device, *std::move(pieces)));
  return OkStatus();
}

/// `buffer` is what the start returned, `result` the same memory unless XLA
/// dropped the alias.
Outcome Done(std::string_view call, int device, RunId run, AnyBuffer buffer,
             AnyBuffer result) {
  if (buffer.element_count() == 0) return OkStatus();
  const InFlight::TransferPtr staged =
      ProcessInFlight().Take(device, buffer.untyped_data(), run.run_id);
  if (staged == nullptr) {
    ProcessInFlight().DropRun(device, run.run_id);  // the program ends here
    return FailedPrecondition(
        std::string(call) + ": no transfer into this buffer is in flight (" +
        Describe(buffer) +
        "). Its start and its done were separated by a copy: both must be in "
        "one body, without a loop, cond, jit or checkpoint edge in between");
  }
  const auto size_bytes = SizeBytes(buffer);
  if (!size_bytes.ok()) return size_bytes.status();
  return Await(*staged->transfer(), [staged, from = Bytes(buffer),
                                     to = Bytes(result), size = *size_bytes] {
    staged->Land();
    if (from != to) offload::CopyDirectly({{from, to, size}});
  });
}

/// One handler a target.

Outcome H2dCopy(int32_t device, AnyBuffer src, Result dst) {
  return Move(Direction::kH2d, device,
              WholePieces("turbobus_h2d_copy", src, *dst));
}

Outcome D2hCopy(int32_t device, AnyBuffer src, AnyBuffer out, Result dst) {
  return Move(Direction::kD2h, device,
              IntoPieces("turbobus_d2h_copy", src, out, *dst));
}

Outcome D2hNew(int32_t device, AnyBuffer src, Result dst) {
  return Move(Direction::kD2h, device,
              WholePieces("turbobus_d2h_new", src, *dst));
}

Outcome Fetch(int32_t device, AnyBuffer stack, AnyBuffer index, Result row,
              int64_t axis) {
  return Move(Direction::kH2d, device,
              FetchPieces("turbobus_fetch", stack, index, *row, axis));
}

Outcome Store(int32_t device, AnyBuffer stack, AnyBuffer index, AnyBuffer row,
              Result result, int64_t axis) {
  return Move(Direction::kD2h, device,
              StorePieces("turbobus_store", stack, index, row, *result, axis));
}

Outcome H2dStart(int32_t device, RunId run, AnyBuffer src, Result dst) {
  return Launch(Direction::kH2d, device, run,
                WholePieces("turbobus_h2d_start", src, *dst), *dst);
}

Outcome D2hStart(int32_t device, RunId run, AnyBuffer src, AnyBuffer out,
                 Result dst) {
  return Launch(Direction::kD2h, device, run,
                IntoPieces("turbobus_d2h_start", src, out, *dst), *dst);
}

Outcome D2hNewStart(int32_t device, RunId run, AnyBuffer src, Result dst) {
  return Launch(Direction::kD2h, device, run,
                WholePieces("turbobus_d2h_new_start", src, *dst), *dst);
}

Outcome FetchStart(int32_t device, RunId run, AnyBuffer stack, AnyBuffer index,
                   Result row, int64_t axis) {
  return Launch(Direction::kH2d, device, run,
                FetchPieces("turbobus_fetch_start", stack, index, *row, axis),
                *row);
}

Outcome StoreStart(int32_t device, RunId run, AnyBuffer stack, AnyBuffer index,
                   AnyBuffer row, Result result, int64_t axis) {
  return Launch(
      Direction::kD2h, device, run,
      StorePieces("turbobus_store_start", stack, index, row, *result, axis),
      *result);
}

Outcome H2dDone(int32_t device, RunId run, AnyBuffer buffer,
                xla::ffi::RemainingArgs, Result result) {
  return Done("turbobus_h2d_done", device, run, buffer, *result);
}

Outcome D2hDone(int32_t device, RunId run, AnyBuffer buffer,
                xla::ffi::RemainingArgs, Result result) {
  return Done("turbobus_d2h_done", device, run, buffer, *result);
}

/// Memory that a later call fills: nothing to do.
Outcome Buffer(AnyBuffer, Result) { return OkStatus(); }

/// Says that what it takes has begun: what XLA:CPU orders by.
Outcome Mark(xla::ffi::RemainingArgs, Result mark) {
  std::memset(mark->untyped_data(), 0, mark->size_bytes());
  return OkStatus();
}

/// Gives `value`, not before `mark`.
Outcome After(AnyBuffer value, AnyBuffer, Result result) {
  if (IsShared(value, *result)) return OkStatus();
  TB_ASSIGN_OR_RETURN(const int64_t size_bytes, SizeBytes(value));
  offload::CopyDirectly({{Bytes(value), Bytes(*result), size_bytes}});
  return OkStatus();
}

/// An operation that XLA counts (jax_turbobus/offload/_marks.py, `tie_p`).
Outcome Nop(Result) { return OkStatus(); }

auto Bind() { return xla::ffi::Ffi::Bind().Ctx<xla::ffi::DeviceOrdinal>(); }

XLA_FFI_DEFINE_HANDLER(kH2dCopy, H2dCopy,
                       Bind().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kD2hNew, D2hNew,
                       Bind().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kD2hNewStart, D2hNewStart,
                       Bind().Ctx<RunId>().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kD2hCopy, D2hCopy,
                       Bind()
                           .Arg<AnyBuffer>()  // src
                           .Arg<AnyBuffer>()  // out
                           .Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kBuffer, Buffer,
                       xla::ffi::Ffi::Bind().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kMark, Mark,
                       xla::ffi::Ffi::Bind().RemainingArgs().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kAfter, After,
                       xla::ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // value
                           .Arg<AnyBuffer>()  // mark
                           .Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kNop, Nop, xla::ffi::Ffi::Bind().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kFetch, Fetch,
                       Bind()
                           .Arg<AnyBuffer>()  // stack
                           .Arg<AnyBuffer>()  // index
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("axis"));
XLA_FFI_DEFINE_HANDLER(kStore, Store,
                       Bind()
                           .Arg<AnyBuffer>()  // stack
                           .Arg<AnyBuffer>()  // index
                           .Arg<AnyBuffer>()  // row
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("axis"));
XLA_FFI_DEFINE_HANDLER(kH2dStart, H2dStart,
                       Bind().Ctx<RunId>().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kD2hStart, D2hStart,
                       Bind()
                           .Ctx<RunId>()
                           .Arg<AnyBuffer>()  // src
                           .Arg<AnyBuffer>()  // out
                           .Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kFetchStart, FetchStart,
                       Bind()
                           .Ctx<RunId>()
                           .Arg<AnyBuffer>()  // stack
                           .Arg<AnyBuffer>()  // index
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("axis"));
XLA_FFI_DEFINE_HANDLER(kStoreStart, StoreStart,
                       Bind()
                           .Ctx<RunId>()
                           .Arg<AnyBuffer>()  // stack
                           .Arg<AnyBuffer>()  // index
                           .Arg<AnyBuffer>()  // row
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("axis"));
XLA_FFI_DEFINE_HANDLER(kH2dDone, H2dDone,
                       Bind()
                           .Ctx<RunId>()
                           .Arg<AnyBuffer>()  // buffer
                           .RemainingArgs()   // what the start read
                           .Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kD2hDone, D2hDone,
                       Bind()
                           .Ctx<RunId>()
                           .Arg<AnyBuffer>()  // buffer
                           .RemainingArgs()   // what the start read
                           .Ret<AnyBuffer>());

}  // namespace

std::vector<Target> OffloadTargets() {
  return {
      {"turbobus_h2d_copy", kH2dCopy},
      {"turbobus_d2h_copy", kD2hCopy},
      {"turbobus_d2h_new", kD2hNew},
      {"turbobus_d2h_new_start", kD2hNewStart},
      {"turbobus_buffer", kBuffer},
      {"turbobus_mark", kMark},
      {"turbobus_after", kAfter},
      {"turbobus_nop", kNop},
      {"turbobus_fetch", kFetch},
      {"turbobus_store", kStore},
      {"turbobus_h2d_start", kH2dStart},
      {"turbobus_d2h_start", kD2hStart},
      {"turbobus_fetch_start", kFetchStart},
      {"turbobus_store_start", kStoreStart},
      {"turbobus_h2d_done", kH2dDone},
      {"turbobus_d2h_done", kD2hDone},
  };
}

}  // namespace turbobus::ffi

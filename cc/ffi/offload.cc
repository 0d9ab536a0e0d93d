#include <cstdint>
#include <cstring>
#include <memory>
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
#include "offload/transfer.h"
#include "topo/path.h"
#include "xla/ffi/api/ffi.h"

// The handlers of docs/ffi.md for CPU devices, where host and device memory are
// both plain memory: kinds cannot be wrong here, aliases and sizes can.

namespace turbobus::ffi {
namespace {

using offload::Piece;
using offload::ProcessInFlight;
using offload::Transfer;
using topo::Direction;
using xla::ffi::AnyBuffer;
using xla::ffi::RunId;
using TransferPtr = std::shared_ptr<Transfer>;
using Result = xla::ffi::Result<AnyBuffer>;

bool IsShared(AnyBuffer a, AnyBuffer b) {
  return a.untyped_data() == b.untyped_data();
}

std::byte* Bytes(AnyBuffer buffer) {
  return static_cast<std::byte*>(buffer.untyped_data());
}

/// Finished when the transfer is; `after` runs first, and only on success.
Outcome Await(
    const TransferPtr& transfer, std::function<void()> after = [] {}) {
  if (const auto outcome = transfer->outcome()) {
    if (outcome->ok()) after();
    return *outcome;
  }
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  transfer->OnDone(
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

/// What a start leaves for its done.
Outcome Launched(const StatusOr<TransferPtr>& transfer, int device,
                 const void* buffer, RunId run) {
  if (!transfer.ok()) return transfer.status();
  for (const TransferPtr& abandoned :
       ProcessInFlight().Insert(device, buffer, run.run_id, *transfer)) {
    // Its program failed between start and done, and its buffer is ours now.
    (void)abandoned->Wait();
  }
  return OkStatus();
}

Outcome Finished(const StatusOr<TransferPtr>& transfer) {
  if (!transfer.ok()) return transfer.status();
  return Await(*transfer);
}

StatusOr<TransferPtr> Copy(std::string_view call, Direction direction,
                           int device, AnyBuffer src, AnyBuffer dst) {
  TB_RETURN_IF_ERROR(CheckSameType(call, "source", src, "result", dst));
  TB_ASSIGN_OR_RETURN(const int64_t size_bytes, SizeBytes(src));
  return Transfer::Start(
      direction, device,
      {{src.untyped_data(), dst.untyped_data(), size_bytes}});
}

std::vector<Piece> RowPieces(const offload::RowSlice& slice, std::byte* stack,
                             std::byte* row, Direction direction) {
  std::vector<Piece> pieces;
  pieces.reserve(slice.num_pieces);
  for (int64_t p = 0; p < slice.num_pieces; ++p) {
    std::byte* in_stack = stack + slice.offset_bytes + p * slice.stride_bytes;
    std::byte* in_row = row + p * slice.piece_bytes;
    if (direction == Direction::kD2h) std::swap(in_stack, in_row);
    pieces.push_back({in_stack, in_row, slice.piece_bytes});
  }
  return pieces;
}

int32_t ReadIndex(AnyBuffer index) {
  int32_t value = 0;
  std::memcpy(&value, index.untyped_data(), sizeof(value));
  return value;
}

StatusOr<TransferPtr> FetchRow(std::string_view call, int device,
                               AnyBuffer stack, AnyBuffer index, AnyBuffer row,
                               int64_t axis) {
  TB_RETURN_IF_ERROR(CheckIndex(call, index));
  TB_ASSIGN_OR_RETURN(const offload::RowSlice slice,
                      CheckRow(call, stack, ReadIndex(index), axis, row));
  return Transfer::Start(
      Direction::kH2d, device,
      RowPieces(slice, Bytes(stack), Bytes(row), Direction::kH2d));
}

StatusOr<TransferPtr> StoreRow(std::string_view call, int device,
                               AnyBuffer stack, AnyBuffer index, AnyBuffer row,
                               AnyBuffer result, int64_t axis) {
  TB_RETURN_IF_ERROR(CheckIndex(call, index));
  TB_RETURN_IF_ERROR(CheckSameType(call, "stack", stack, "result", result));
  TB_ASSIGN_OR_RETURN(const offload::RowSlice slice,
                      CheckRow(call, stack, ReadIndex(index), axis, row));
  if (!IsShared(stack, result)) {
    TB_ASSIGN_OR_RETURN(const int64_t size_bytes, SizeBytes(stack));
    std::memcpy(Bytes(result), Bytes(stack), size_bytes);
  }
  return Transfer::Start(
      Direction::kD2h, device,
      RowPieces(slice, Bytes(result), Bytes(row), Direction::kD2h));
}

/// The second half: `buffer` is what the start wrote to, `result` the same
/// memory unless XLA dropped the alias.
Outcome Done(std::string_view call, int device, RunId run, AnyBuffer buffer,
             AnyBuffer result) {
  const TransferPtr transfer =
      ProcessInFlight().Take(device, buffer.untyped_data(), run.run_id);
  if (transfer == nullptr) {
    // The program ends here and its buffers go: nothing may still write.
    for (const TransferPtr& other :
         ProcessInFlight().TakeRun(device, run.run_id)) {
      (void)other->Wait();
    }
    return FailedPrecondition(
        std::string(call) + ": no transfer into this buffer is in flight (" +
        Describe(buffer) +
        "). Its start and its done were separated by a copy: both must be in "
        "one body, without a loop, cond, jit or checkpoint edge in between");
  }
  if (IsShared(buffer, result)) return Await(transfer);
  const auto size_bytes = SizeBytes(buffer);
  if (!size_bytes.ok()) return size_bytes.status();
  return Await(transfer,
               [from = buffer.untyped_data(), to = result.untyped_data(),
                size = *size_bytes] { std::memcpy(to, from, size); });
}

Outcome H2dCopy(int32_t device, AnyBuffer src, Result dst) {
  return Finished(
      Copy("turbobus_h2d_copy", Direction::kH2d, device, src, *dst));
}

Outcome D2hCopy(int32_t device, AnyBuffer src, AnyBuffer out, Result dst) {
  const Status same =
      CheckSameType("turbobus_d2h_copy", "out", out, "result", *dst);
  if (!same.ok()) return same;
  return Finished(
      Copy("turbobus_d2h_copy", Direction::kD2h, device, src, *dst));
}

Outcome D2hNewStart(int32_t device, RunId run, AnyBuffer src, Result dst) {
  return Launched(
      Copy("turbobus_d2h_new_start", Direction::kD2h, device, src, *dst),
      device, dst->untyped_data(), run);
}

Outcome D2hNew(int32_t device, AnyBuffer src, Result dst) {
  return Finished(Copy("turbobus_d2h_new", Direction::kD2h, device, src, *dst));
}

/// Memory that a later call fills: nothing to do.
Outcome Buffer(AnyBuffer, Result) { return OkStatus(); }

Outcome Fetch(int32_t device, AnyBuffer stack, AnyBuffer index, Result row,
              int64_t axis) {
  return Finished(FetchRow("turbobus_fetch", device, stack, index, *row, axis));
}

Outcome Store(int32_t device, AnyBuffer stack, AnyBuffer index, AnyBuffer row,
              Result result, int64_t axis) {
  return Finished(
      StoreRow("turbobus_store", device, stack, index, row, *result, axis));
}

Outcome H2dStart(int32_t device, RunId run, AnyBuffer src, Result dst) {
  return Launched(
      Copy("turbobus_h2d_start", Direction::kH2d, device, src, *dst), device,
      dst->untyped_data(), run);
}

Outcome D2hStart(int32_t device, RunId run, AnyBuffer src, AnyBuffer out,
                 Result dst) {
  const Status same =
      CheckSameType("turbobus_d2h_start", "out", out, "result", *dst);
  if (!same.ok()) return same;
  return Launched(
      Copy("turbobus_d2h_start", Direction::kD2h, device, src, *dst), device,
      dst->untyped_data(), run);
}

Outcome FetchStart(int32_t device, RunId run, AnyBuffer stack, AnyBuffer index,
                   Result row, int64_t axis) {
  return Launched(
      FetchRow("turbobus_fetch_start", device, stack, index, *row, axis),
      device, row->untyped_data(), run);
}

Outcome StoreStart(int32_t device, RunId run, AnyBuffer stack, AnyBuffer index,
                   AnyBuffer row, Result result, int64_t axis) {
  return Launched(StoreRow("turbobus_store_start", device, stack, index, row,
                           *result, axis),
                  device, result->untyped_data(), run);
}

Outcome H2dDone(int32_t device, RunId run, AnyBuffer buffer,
                xla::ffi::RemainingArgs, Result result) {
  return Done("turbobus_h2d_done", device, run, buffer, *result);
}

Outcome D2hDone(int32_t device, RunId run, AnyBuffer buffer,
                xla::ffi::RemainingArgs, Result result) {
  return Done("turbobus_d2h_done", device, run, buffer, *result);
}

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

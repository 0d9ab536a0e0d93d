#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "engine/stream_engine.h"
#include "ffi/cuda/nvtx_range.h"
#include "ffi/cuda/process_stream_engine.h"
#include "ffi/cuda/targets.h"
#include "ffi/error.h"
#include "ffi/offload_buffer.h"
#include "offload/layout.h"
#include "topo/path.h"
#include "transport/cuda/device_guard.h"
#include "xla/ffi/api/ffi.h"

// The handlers of docs/ffi.md for CUDA devices. They issue and return: nothing
// here waits for a device. If another op fails between a start and its done,
// the run's end waits for the transfer (`SideRun`).

namespace turbobus::ffi {
namespace {

using engine::CopyRequest;
using engine::LeaveRequest;
using engine::RowRequest;
using engine::StreamEngine;
using topo::Direction;
using xla::ffi::AnyBuffer;
using xla::ffi::Error;
using xla::ffi::RunId;
using Result = xla::ffi::Result<AnyBuffer>;
using Stream = cudaStream_t;

/// A call's name on the profiler's time line, and its place on the device.
struct Scope {
  explicit Scope(const char* call) : range({call}) {}

  const NvtxRange range;
  const transport::cuda::DeviceGuard guard;
};

std::byte* Bytes(AnyBuffer buffer) {
  return static_cast<std::byte*>(buffer.untyped_data());
}

bool IsShared(AnyBuffer a, AnyBuffer b) {
  return a.untyped_data() == b.untyped_data();
}

/// XLA has one for each start while it enqueues a run on a device. It destroys
/// them when all is enqueued or an op has failed, before anybody else has the
/// run's buffers: nothing in flight then may read or write them later.
class SideRun {
 public:
  static xla::ffi::TypeId id;

  SideRun(StreamEngine& engine, const LeaveRequest& run)
      : engine_(engine), run_(run) {}
  ~SideRun() { engine_.Leave(run_); }
  SideRun(const SideRun&) = delete;
  SideRun& operator=(const SideRun&) = delete;

 private:
  StreamEngine& engine_;
  const LeaveRequest run_;
};

xla::ffi::TypeId SideRun::id = XLA_FFI_UNKNOWN_TYPE_ID;
// Behind the class: of an incomplete one the destructor would not be called.
constexpr xla::ffi::TypeInfo kSideRunInfo = xla::ffi::MakeTypeInfo<SideRun>();

xla::ffi::ErrorOr<std::unique_ptr<SideRun>> BeginSideRun(
    Stream stream, int32_t gpu, RunId run, xla::ffi::RemainingArgs /*args*/,
    xla::ffi::RemainingRets /*results*/, xla::ffi::Dictionary /*attributes*/) {
  const StatusOr<StreamEngine*> engine = ProcessStreamEngine();
  if (!engine.ok()) return xla::ffi::Unexpected(ToError(engine.status()));
  return std::make_unique<SideRun>(
      **engine, LeaveRequest{.gpu = gpu, .stream = stream, .run = run.run_id});
}

/// What every handler is bound to.
struct Call {
  const char* name;
  Stream stream;
  int gpu;
  int64_t run;
};

StatusOr<CopyRequest> CopyOf(const Call& call, Direction direction,
                             AnyBuffer src, AnyBuffer dst) {
  TB_RETURN_IF_ERROR(CheckSameType(call.name, "source", src, "result", dst));
  TB_ASSIGN_OR_RETURN(const int64_t size_bytes, SizeBytes(src));
  return CopyRequest{.call = call.name,
                     .gpu = call.gpu,
                     .direction = direction,
                     .stream = call.stream,
                     .run = call.run,
                     .src = src.untyped_data(),
                     .dst = dst.untyped_data(),
                     .size_bytes = size_bytes};
}

Status Copy(const Call& call, Direction direction, AnyBuffer src, AnyBuffer dst,
            bool is_start) {
  const Scope scope(call.name);
  TB_ASSIGN_OR_RETURN(StreamEngine* const engine, ProcessStreamEngine());
  TB_ASSIGN_OR_RETURN(const CopyRequest request,
                      CopyOf(call, direction, src, dst));
  return is_start ? engine->Start(request) : engine->Copy(request);
}

StatusOr<RowRequest> RowOf(const Call& call, AnyBuffer stack, AnyBuffer index,
                           AnyBuffer row, int64_t axis, bool is_store) {
  TB_RETURN_IF_ERROR(CheckIndex(call.name, index));
  TB_ASSIGN_OR_RETURN(const offload::RowSlice slice,
                      CheckRow(call.name, stack, /*index=*/0, axis, row));
  RowRequest request = {.call = call.name,
                        .gpu = call.gpu,
                        .stream = call.stream,
                        .run = call.run,
                        .row = {}};
  request.row.stack = Bytes(stack);
  request.row.row = Bytes(row);
  request.row.index = static_cast<const int32_t*>(index.untyped_data());
  request.row.num_rows = static_cast<int32_t>(stack.dimensions()[axis]);
  request.row.piece_bytes = slice.piece_bytes;
  request.row.num_pieces = slice.num_pieces;
  request.row.stride_bytes = slice.stride_bytes;
  request.row.is_store = is_store;
  return request;
}

Status FetchRow(const Call& call, AnyBuffer stack, AnyBuffer index,
                AnyBuffer row, int64_t axis, bool is_start) {
  const Scope scope(call.name);
  TB_ASSIGN_OR_RETURN(StreamEngine* const engine, ProcessStreamEngine());
  TB_ASSIGN_OR_RETURN(const RowRequest request,
                      RowOf(call, stack, index, row, axis, false));
  return is_start ? engine->StartRow(request) : engine->CopyRow(request);
}

Status StoreRow(const Call& call, AnyBuffer stack, AnyBuffer index,
                AnyBuffer row, AnyBuffer result, int64_t axis, bool is_start) {
  const Scope scope(call.name);
  TB_ASSIGN_OR_RETURN(StreamEngine* const engine, ProcessStreamEngine());
  if (!IsShared(stack, result)) {
    // XLA dropped the alias: the rest of the stack has to come along.
    TB_ASSIGN_OR_RETURN(const CopyRequest whole,
                        CopyOf(call, Direction::kD2h, stack, result));
    TB_RETURN_IF_ERROR(engine->Copy(whole));
  }
  TB_ASSIGN_OR_RETURN(const RowRequest request,
                      RowOf(call, result, index, row, axis, true));
  return is_start ? engine->StartRow(request) : engine->CopyRow(request);
}

Status Done(const Call& call, Direction direction, AnyBuffer buffer,
            AnyBuffer result) {
  const Scope scope(call.name);
  TB_ASSIGN_OR_RETURN(StreamEngine* const engine, ProcessStreamEngine());
  TB_ASSIGN_OR_RETURN(const int64_t size_bytes, SizeBytes(buffer));
  if (size_bytes == 0) return OkStatus();
  TB_RETURN_IF_ERROR(engine->Done({.call = call.name,
                                   .gpu = call.gpu,
                                   .stream = call.stream,
                                   .run = call.run,
                                   .buffer = buffer.untyped_data()}));
  if (IsShared(buffer, result)) return OkStatus();
  TB_ASSIGN_OR_RETURN(const CopyRequest move,
                      CopyOf(call, direction, buffer, result));
  return engine->Copy(move);
}

template <bool kIsStart>
Error H2d(Stream stream, int32_t gpu, RunId run, AnyBuffer src, Result dst) {
  constexpr const char* kName =
      kIsStart ? "turbobus_h2d_start" : "turbobus_h2d_copy";
  return ToError(Copy({kName, stream, gpu, run.run_id}, Direction::kH2d, src,
                      *dst, kIsStart));
}

template <bool kIsStart>
Error D2h(Stream stream, int32_t gpu, RunId run, AnyBuffer src, AnyBuffer out,
          Result dst) {
  constexpr const char* kName =
      kIsStart ? "turbobus_d2h_start" : "turbobus_d2h_copy";
  if (Status same = CheckSameType(kName, "out", out, "result", *dst);
      !same.ok()) {
    return ToError(same);
  }
  return ToError(Copy({kName, stream, gpu, run.run_id}, Direction::kD2h, src,
                      *dst, kIsStart));
}

template <bool kIsStart>
Error Fetch(Stream stream, int32_t gpu, RunId run, AnyBuffer stack,
            AnyBuffer index, Result row, int64_t axis) {
  constexpr const char* kName =
      kIsStart ? "turbobus_fetch_start" : "turbobus_fetch";
  return ToError(FetchRow({kName, stream, gpu, run.run_id}, stack, index, *row,
                          axis, kIsStart));
}

template <bool kIsStart>
Error Store(Stream stream, int32_t gpu, RunId run, AnyBuffer stack,
            AnyBuffer index, AnyBuffer row, Result result, int64_t axis) {
  constexpr const char* kName =
      kIsStart ? "turbobus_store_start" : "turbobus_store";
  return ToError(StoreRow({kName, stream, gpu, run.run_id}, stack, index, row,
                          *result, axis, kIsStart));
}

Error H2dDone(Stream stream, int32_t gpu, RunId run, AnyBuffer buffer,
              xla::ffi::RemainingArgs, Result result) {
  return ToError(Done({"turbobus_h2d_done", stream, gpu, run.run_id},
                      Direction::kH2d, buffer, *result));
}

Error D2hDone(Stream stream, int32_t gpu, RunId run, AnyBuffer buffer,
              xla::ffi::RemainingArgs, Result result) {
  return ToError(Done({"turbobus_d2h_done", stream, gpu, run.run_id},
                      Direction::kD2h, buffer, *result));
}

auto Bind() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<Stream>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Ctx<RunId>();
}
auto BindH2d() { return Bind().Arg<AnyBuffer>().Ret<AnyBuffer>(); }
auto BindD2h() {
  return Bind()
      .Arg<AnyBuffer>()  // src
      .Arg<AnyBuffer>()  // out
      .Ret<AnyBuffer>();
}
auto BindFetch() {
  return Bind()
      .Arg<AnyBuffer>()  // stack
      .Arg<AnyBuffer>()  // index
      .Ret<AnyBuffer>()
      .Attr<int64_t>("axis");
}
auto BindStore() {
  return Bind()
      .Arg<AnyBuffer>()  // stack
      .Arg<AnyBuffer>()  // index
      .Arg<AnyBuffer>()  // row
      .Ret<AnyBuffer>()
      .Attr<int64_t>("axis");
}
auto BindDone() {
  return Bind()
      .Arg<AnyBuffer>()  // buffer
      .RemainingArgs()   // what the start read
      .Ret<AnyBuffer>();
}

auto BindSideRun() {
  return xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
      .Ctx<xla::ffi::PlatformStream<Stream>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Ctx<RunId>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_DEFINE_HANDLER(kBeginSideRun, BeginSideRun, BindSideRun());
XLA_FFI_DEFINE_HANDLER(kH2dCopy, H2d<false>, BindH2d());
XLA_FFI_DEFINE_HANDLER(kH2dStart, H2d<true>, BindH2d());
XLA_FFI_DEFINE_HANDLER(kD2hCopy, D2h<false>, BindD2h());
XLA_FFI_DEFINE_HANDLER(kD2hStart, D2h<true>, BindD2h());
XLA_FFI_DEFINE_HANDLER(kFetch, Fetch<false>, BindFetch());
XLA_FFI_DEFINE_HANDLER(kFetchStart, Fetch<true>, BindFetch());
XLA_FFI_DEFINE_HANDLER(kStore, Store<false>, BindStore());
XLA_FFI_DEFINE_HANDLER(kStoreStart, Store<true>, BindStore());
XLA_FFI_DEFINE_HANDLER(kH2dDone, H2dDone, BindDone());
XLA_FFI_DEFINE_HANDLER(kD2hDone, D2hDone, BindDone());

}  // namespace

std::vector<StateType> CudaOffloadStateTypes() {
  return {{"turbobus_offload_side_run", &SideRun::id, &kSideRunInfo}};
}

std::vector<Target> CudaOffloadTargets() {
  return {
      {"turbobus_h2d_copy", kH2dCopy},
      {"turbobus_h2d_start", kH2dStart, kBeginSideRun},
      {"turbobus_d2h_copy", kD2hCopy},
      {"turbobus_d2h_start", kD2hStart, kBeginSideRun},
      {"turbobus_fetch", kFetch},
      {"turbobus_fetch_start", kFetchStart, kBeginSideRun},
      {"turbobus_store", kStore},
      {"turbobus_store_start", kStoreStart, kBeginSideRun},
      {"turbobus_h2d_done", kH2dDone},
      {"turbobus_d2h_done", kD2hDone},
  };
}

}  // namespace turbobus::ffi

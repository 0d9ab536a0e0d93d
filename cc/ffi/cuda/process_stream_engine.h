#ifndef TURBOBUS_FFI_CUDA_PROCESS_STREAM_ENGINE_H_
#define TURBOBUS_FFI_CUDA_PROCESS_STREAM_ENGINE_H_

#include <memory>

#include "base/status.h"
#include "engine/stream_engine.h"

namespace turbobus::ffi {

/// The engine of this process's GPUs. It lives until the process ends: CUDA may
/// be gone before destructors run.
///
/// FAILED_PRECONDITION, with what to do, before `SetProcessStreamEngine` and in
/// a child of a fork, where CUDA does not work. Thread-safe.
StatusOr<engine::StreamEngine*> ProcessStreamEngine();

/// ALREADY_EXISTS if there is one.
Status SetProcessStreamEngine(std::unique_ptr<engine::StreamEngine> engine);

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_CUDA_PROCESS_STREAM_ENGINE_H_

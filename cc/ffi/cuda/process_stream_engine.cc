#include "ffi/cuda/process_stream_engine.h"

#include <unistd.h>

#include <atomic>

namespace turbobus::ffi {
namespace {

std::atomic<engine::StreamEngine*> g_engine = nullptr;
std::atomic<pid_t> g_owner = 0;

}  // namespace

StatusOr<engine::StreamEngine*> ProcessStreamEngine() {
  engine::StreamEngine* const engine = g_engine.load();
  if (engine == nullptr) {
    return FailedPrecondition(
        "the engine of the GPUs has not been started; import jax_turbobus "
        "before you run a program that uses it");
  }
  if (getpid() != g_owner.load()) {
    return FailedPrecondition(
        "this process was forked from one that uses GPUs, and CUDA does not "
        "survive a fork; start it with multiprocessing's \"spawn\"");
  }
  return engine;
}

Status SetProcessStreamEngine(std::unique_ptr<engine::StreamEngine> engine) {
  g_owner = getpid();
  engine::StreamEngine* none = nullptr;
  if (!g_engine.compare_exchange_strong(none, engine.get())) {
    return {StatusCode::kAlreadyExists,
            "the engine of the GPUs has been started already"};
  }
  (void)engine.release();
  return OkStatus();
}

}  // namespace turbobus::ffi

#include "engine/fork.h"

#include <pthread.h>

#include <atomic>

namespace turbobus::engine {
namespace {

std::atomic<uint64_t> generation = 0;

}  // namespace

uint64_t ForkGeneration() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    generation.fetch_add(1, std::memory_order_relaxed);
  });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace turbobus::engine

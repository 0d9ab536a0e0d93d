#include <mutex>
#include <utility>

#include "engine/engine.h"

namespace turbobus::engine {
namespace {

std::mutex& Mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::shared_ptr<Engine>& Slot() {
  static auto* const slot = new std::shared_ptr<Engine>;
  return *slot;
}

}  // namespace

std::shared_ptr<Engine> ProcessEngine() {
  const std::lock_guard lock(Mutex());
  return Slot();
}

void SetProcessEngine(std::shared_ptr<Engine> engine) {
  // The old engine drains in its destructor, so it must go outside the lock.
  {
    const std::lock_guard lock(Mutex());
    Slot().swap(engine);
  }
}

}  // namespace turbobus::engine

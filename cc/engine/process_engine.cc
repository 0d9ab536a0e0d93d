#include <pthread.h>

#include <mutex>
#include <new>
#include <utility>

#include "engine/engine.h"

namespace turbobus::engine {
namespace {

// Never destroyed: threads of XLA may ask while the process exits.
struct Slot {
  std::mutex mutex;
  std::shared_ptr<Engine> engine;
};

Slot& TheSlot() {
  static auto* const slot = [] {
    auto* const made = new Slot;
    // A fork must not copy the lock while another thread holds it, and the
    // child has no engine: its copy has no threads. Nothing of it is destroyed
    // there.
    pthread_atfork([] { TheSlot().mutex.lock(); },
                   [] { TheSlot().mutex.unlock(); },
                   [] {
                     TheSlot().mutex.unlock();
                     new (&TheSlot().engine) std::shared_ptr<Engine>;
                   });
    return made;
  }();
  return *slot;
}

}  // namespace

std::shared_ptr<Engine> ProcessEngine() {
  Slot& slot = TheSlot();
  const std::lock_guard lock(slot.mutex);
  return slot.engine;
}

void SetProcessEngine(std::shared_ptr<Engine> engine) {
  Slot& slot = TheSlot();
  // The old engine drains in its destructor, so it must go outside the lock.
  {
    const std::lock_guard lock(slot.mutex);
    slot.engine.swap(engine);
  }
}

}  // namespace turbobus::engine

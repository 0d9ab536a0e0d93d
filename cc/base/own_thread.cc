#include "base/own_thread.h"

#include <system_error>
#include <thread>
#include <utility>

namespace turbobus {

void RunOnOwnThread(std::function<void()> work) {
  try {
    std::thread(work).detach();
  } catch (const std::system_error&) {
    work();
  }
}

}  // namespace turbobus

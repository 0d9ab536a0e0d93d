#include "base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <utility>

namespace turbobus {

StatusOr<std::thread> StartThread(const std::string& name,
                                  std::function<void()> body) {
  // The new thread inherits the mask, so there is no moment without it.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  StatusOr<std::thread> result = Status();
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    result = std::move(thread);
  } catch (const std::system_error& error) {
    result = ResourceExhausted("cannot start the thread " + name + ": " +
                               error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return result;
}

}  // namespace turbobus

#ifndef TURBOBUS_BASE_OWN_THREAD_H_
#define TURBOBUS_BASE_OWN_THREAD_H_

#include <functional>

namespace turbobus {

/// Runs `work` on a thread that nothing else waits for. `work` may block.
///
/// XLA continues a program on the thread that completes a promise, and that
/// continuation may itself wait for another promise: completing two from one
/// thread can hang. Where no thread can be had, `work` runs on the caller's.
void RunOnOwnThread(std::function<void()> work);

}  // namespace turbobus

#endif  // TURBOBUS_BASE_OWN_THREAD_H_

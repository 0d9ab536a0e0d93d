#ifndef TURBOBUS_BASE_THREAD_H_
#define TURBOBUS_BASE_THREAD_H_

#include <functional>
#include <string>
#include <thread>

#include "base/status.h"

namespace turbobus {

/// Starts a thread that runs `body`, under a name (at most 15 bytes) that
/// debuggers and `top -H` show. It takes no signals: those are for the threads
/// of the program that we are a guest in. RESOURCE_EXHAUSTED if the system has
/// no thread to give.
StatusOr<std::thread> StartThread(const std::string& name,
                                  std::function<void()> body);

}  // namespace turbobus

#endif  // TURBOBUS_BASE_THREAD_H_

#ifndef TURBOBUS_ENGINE_FORK_H_
#define TURBOBUS_ENGINE_FORK_H_

#include <cstdint>

namespace turbobus::engine {

/// How many forks lie between the first call and this process. An object that
/// remembers the number of its making and sees another one is a copy in a
/// child: its threads do not exist there, and its locks may be held for ever.
uint64_t ForkGeneration();

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_FORK_H_

#ifndef TURBOBUS_ENGINE_LIVE_FOLDER_H_
#define TURBOBUS_ENGINE_LIVE_FOLDER_H_

#include <cstddef>
#include <string>

#include "base/status.h"

namespace turbobus::engine {

/// A file for a `LivePage`.
struct LiveFile {
  std::string path;
  /// The caller closes it.
  int fd = -1;
};

/// Makes an empty file of `size_bytes` zeros in `folder`, which it makes where
/// it is not, and removes those of processes that are gone. The name is
/// `<pid>.<start time>.<PID namespace>.<number>`.
///
/// UNAVAILABLE, naming the file, if that cannot be, or if the folder is not the
/// user's alone: what is in it could be another's.
StatusOr<LiveFile> MakeLiveFile(const std::string& folder, size_t size_bytes);

}  // namespace turbobus::engine

#endif  // TURBOBUS_ENGINE_LIVE_FOLDER_H_

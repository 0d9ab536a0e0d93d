#include "transport/cuda/lender_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace turbobus::transport::cuda {

StatusOr<std::unique_ptr<LenderLock>> LenderLock::Take(
    const std::string& uuid) {
  const char* const directory = std::getenv("JAX_TURBOBUS_LOCK_DIR");
  const std::string path =
      std::string(directory != nullptr ? directory : "/tmp") +
      "/jax_turbobus-lender-" + uuid + ".lock";
  // Opened before it is made: kernels refuse O_CREAT on a file that another
  // user owns in a sticky directory.
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) {
    fd = open(path.c_str(), O_RDONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0 && errno == EEXIST) {
      fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    }
  }
  if (fd < 0) {
    return Unavailable("the lock file " + path +
                       " cannot be opened: " + std::strerror(errno) +
                       "; set JAX_TURBOBUS_LOCK_DIR to a directory that all "
                       "processes can write to");
  }
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    close(fd);
    return Unavailable(
        error == EWOULDBLOCK
            ? "another process lends this GPU's link (it holds " + path + ")"
            : "cannot lock " + path + ": " + std::strerror(error));
  }
  return std::unique_ptr<LenderLock>(new LenderLock(fd));
}

LenderLock::~LenderLock() { close(fd_); }

}  // namespace turbobus::transport::cuda

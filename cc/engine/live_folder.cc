#include "engine/live_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

namespace turbobus::engine {
namespace {

/// Engines that one process may have at once, more than anybody has.
constexpr int kMaxFiles = 4096;
/// The field of /proc/<pid>/stat after the command's name.
constexpr int kStartTimeField = 20;

struct FileCloser {
  int fd;
  ~FileCloser() { close(fd); }
};

Status Error(const std::string& what, int error) {
  return Unavailable(what + ": " + std::strerror(error) +
                     "; set JAX_TURBOBUS_LOCK_DIR to a directory that this "
                     "process can write to");
}

std::string ReadFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const FileCloser closer{fd};
  char text[4096];
  const ssize_t size = read(fd, text, sizeof(text));
  return {text, size > 0 ? static_cast<size_t>(size) : 0};
}

/// In ticks since the machine started; 0 where there is no such process.
uint64_t StartTimeOf(int64_t pid) {
  const std::string stat = ReadFile("/proc/" + std::to_string(pid) + "/stat");
  // The command may have spaces and parentheses of its own.
  size_t at = stat.rfind(')');
  for (int field = 0; field < kStartTimeField && at != std::string::npos;
       ++field) {
    at = stat.find(' ', at + 1);
  }
  if (at == std::string::npos) return 0;
  // What nobody has waited for yet moves nothing any more.
  const char state = stat[stat.rfind(')') + 2];
  if (state == 'Z' || state == 'X') return 0;
  return std::strtoull(stat.c_str() + at, nullptr, 10);
}

/// Processes of other containers may share the folder: their numbers mean
/// nothing here.
uint64_t PidNamespace() {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

struct Owner {
  int64_t pid = 0;
  uint64_t start_time = 0;
  uint64_t pid_namespace = 0;
};

std::optional<Owner> OwnerOf(const char* name) {
  uint64_t numbers[4];
  for (int i = 0; i < 4; ++i) {
    if (*name < '0' || *name > '9') return std::nullopt;
    char* end = nullptr;
    errno = 0;
    numbers[i] = std::strtoull(name, &end, 10);
    if (errno != 0 || *end != (i < 3 ? '.' : '\0')) return std::nullopt;
    name = end + 1;
  }
  if (numbers[0] == 0 || numbers[0] > INT32_MAX) return std::nullopt;
  return Owner{static_cast<int64_t>(numbers[0]), numbers[1], numbers[2]};
}

void RemoveDead(int folder, uint64_t pid_namespace) {
  const int listed = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (listed < 0) return;
  const std::unique_ptr<DIR, int (*)(DIR*)> files(fdopendir(listed), &closedir);
  if (files == nullptr) {
    close(listed);
    return;
  }
  while (const dirent* const file = readdir(files.get())) {
    const std::optional<Owner> owner = OwnerOf(file->d_name);
    if (owner.has_value() && owner->pid_namespace == pid_namespace &&
        StartTimeOf(owner->pid) != owner->start_time) {
      unlinkat(folder, file->d_name, 0);
    }
  }
}

}  // namespace

StatusOr<LiveFile> MakeLiveFile(const std::string& folder, size_t size_bytes) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return Error("the folder " + folder + " cannot be made", errno);
  }
  const int folder_fd =
      open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder_fd < 0) {
    return Error("the folder " + folder + " cannot be opened", errno);
  }
  const FileCloser closer{folder_fd};
  struct stat info;
  if (fstat(folder_fd, &info) != 0 || info.st_uid != geteuid() ||
      (info.st_mode & 077) != 0) {
    return Error("the folder " + folder + " is not this user's alone", EPERM);
  }
  const uint64_t start_time = StartTimeOf(getpid());
  const uint64_t pid_namespace = PidNamespace();
  if (start_time == 0) {
    return Error("/proc does not say when this process started", ENOENT);
  }
  RemoveDead(folder_fd, pid_namespace);
  const std::string stem = std::to_string(getpid()) + "." +
                           std::to_string(start_time) + "." +
                           std::to_string(pid_namespace) + ".";
  for (int number = 0; number < kMaxFiles; ++number) {
    const std::string name = stem + std::to_string(number);
    const std::string path = folder + "/" + name;
    const int fd =
        openat(folder_fd, name.c_str(),
               O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0 && errno == EEXIST) continue;
    if (fd < 0) return Error("the file " + path + " cannot be made", errno);
    // Writing to a hole of a full file system would end the process.
    const int error = posix_fallocate(fd, 0, static_cast<off_t>(size_bytes));
    if (error != 0) {
      close(fd);
      unlinkat(folder_fd, name.c_str(), 0);
      return Error("the file " + path + " gets no room", error);
    }
    return LiveFile{path, fd};
  }
  return Error("the folder " + folder + " is full", EEXIST);
}

}  // namespace turbobus::engine

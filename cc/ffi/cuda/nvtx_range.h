#ifndef TURBOBUS_FFI_CUDA_NVTX_RANGE_H_
#define TURBOBUS_FFI_CUDA_NVTX_RANGE_H_

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>

namespace turbobus::ffi {

/// A name on the profiler's time line, as long as this lives, of the thread
/// that makes it. Without a profiler it costs some nanoseconds.
class NvtxRange {
 public:
  /// The name is `parts` in a row, or as much of it as there is room for.
  explicit NvtxRange(std::initializer_list<std::string_view> parts) {
    std::array<char, 128> name;
    size_t used = 0;
    for (const std::string_view part : parts) {
      used += part.copy(name.data() + used, name.size() - 1 - used);
    }
    name[used] = '\0';
    nvtxRangePushA(name.data());
  }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace turbobus::ffi

#endif  // TURBOBUS_FFI_CUDA_NVTX_RANGE_H_

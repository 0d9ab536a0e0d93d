#ifndef TURBOBUS_MOE_CUDA_CUTTER_H_
#define TURBOBUS_MOE_CUDA_CUTTER_H_

#include <algorithm>
#include <cstdint>

namespace turbobus::moe::cuda {

/// Cuts arrays out of one piece of memory, one after the other; without memory
/// it only learns how much they need.
class Cutter {
 public:
  explicit Cutter(void* memory) : memory_(static_cast<uint8_t*>(memory)) {}

  template <typename T>
  T* Take(int64_t count) {
    const int64_t begin = used_bytes_;
    const int64_t bytes =
        std::max<int64_t>(count, 0) * static_cast<int64_t>(sizeof(T));
    used_bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + begin);
  }

  int64_t used_bytes() const { return used_bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;

  uint8_t* const memory_;
  int64_t used_bytes_ = 0;
};

}  // namespace turbobus::moe::cuda

#endif  // TURBOBUS_MOE_CUDA_CUTTER_H_

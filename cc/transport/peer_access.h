#ifndef TURBOBUS_TRANSPORT_PEER_ACCESS_H_
#define TURBOBUS_TRANSPORT_PEER_ACCESS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"

namespace turbobus::transport {

/// Which GPUs reach the memory of which others. What is said of a pair once
/// holds for good: compiled programs go by it.
///
/// Thread-safe. A pair that was asked about before costs a load; the first time
/// it blocks as long as `Enable` does.
class PeerAccess {
 public:
  /// Lets `from` reach the memory of `to`, now and later, or says why it
  /// cannot.
  using Enable = std::function<Status(int from, int to)>;

  /// With a `reason` no GPU is let into the memory of another one.
  explicit PeerAccess(Enable enable, std::string reason = "")
      : enable_(std::move(enable)), reason_(std::move(reason)) {}

  /// Whether `from` reaches the memory of `to`. Every GPU does its own.
  bool Has(int from, int to);

  /// The same; UNAVAILABLE, naming both and the reason, if it does not.
  Status Check(int from, int to);

 private:
  static constexpr int kMaxGpus = 64;
  enum class Answer : uint8_t { kUnknown, kYes, kNo };

  Status Ask(int from, int to);

  const Enable enable_;
  const std::string reason_;
  std::array<std::atomic<Answer>, kMaxGpus * kMaxGpus> answers_{};
  std::mutex mutex_;
  std::map<std::pair<int, int>, Status> refused_;  // Guarded by `mutex_`.
};

}  // namespace turbobus::transport

#endif  // TURBOBUS_TRANSPORT_PEER_ACCESS_H_

#include "engine/stream_settings.h"

#include <string>
#include <string_view>

#include "engine/stream_engine.h"

// What may be set before and between transfers.

namespace turbobus::engine {
namespace {

Status CheckPositive(std::string_view name, double value) {
  if (value > 0) return OkStatus();
  return InvalidArgument(std::string(name) + " must be positive, got " +
                         std::to_string(value));
}

}  // namespace

Status Validate(const StreamSettings& settings) {
  TB_RETURN_IF_ERROR(
      CheckPositive("block_bytes", static_cast<double>(settings.block_bytes)));
  TB_RETURN_IF_ERROR(CheckPositive(
      "min_pooled_bytes", static_cast<double>(settings.min_pooled_bytes)));
  if (settings.late_factor < 1) {
    return InvalidArgument("late_factor must be at least 1, got " +
                           std::to_string(settings.late_factor));
  }
  if (settings.direct_latency_ns < 0 || settings.relay_latency_ns < 0) {
    return InvalidArgument("latencies must not be negative");
  }
  return OkStatus();
}

Status CheckRate(double bandwidth_bytes_per_s) {
  return CheckPositive("a path's bandwidth", bandwidth_bytes_per_s);
}

StreamSettings StreamEngine::settings() const {
  const std::lock_guard lock(mutex_);
  return settings_;
}

Status StreamEngine::SetSettings(const StreamSettings& settings) {
  TB_RETURN_IF_ERROR(Validate(settings));
  const std::lock_guard lock(mutex_);
  if (settings.block_bytes > lanes_.slot_bytes()) {
    return InvalidArgument(
        "block_bytes must be at most " + std::to_string(lanes_.slot_bytes()) +
        ", the size of the staging blocks made at the start; got " +
        std::to_string(settings.block_bytes));
  }
  const bool starts_trace = settings.is_traced && !settings_.is_traced;
  settings_ = settings;
  if (starts_trace) SetEpochs();
  return OkStatus();
}

Status StreamEngine::SetRates(
    const std::vector<double>& bandwidth_bytes_per_s) {
  const std::lock_guard lock(mutex_);
  if (bandwidth_bytes_per_s.size() != paths_.size()) {
    return InvalidArgument("expected a rate for each of " +
                           std::to_string(paths_.size()) + " paths, got " +
                           std::to_string(bandwidth_bytes_per_s.size()));
  }
  for (const double rate : bandwidth_bytes_per_s) {
    TB_RETURN_IF_ERROR(CheckRate(rate));
  }
  for (size_t i = 0; i < paths_.size(); ++i) {
    paths_[i].bandwidth_bytes_per_s = bandwidth_bytes_per_s[i];
    stats_.paths[i].path = paths_[i];
  }
  return OkStatus();
}

}  // namespace turbobus::engine

#ifndef TURBOBUS_OFFLOAD_MANUAL_ENGINE_H_
#define TURBOBUS_OFFLOAD_MANUAL_ENGINE_H_

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace turbobus::offload {

/// An engine for tests that moves bytes only when told to. While it lives it is
/// the process's engine.
class ManualEngine {
 public:
  ManualEngine() : engine_(std::make_shared<Impl>()) {
    engine::SetProcessEngine(engine_);
  }
  ~ManualEngine() { engine::SetProcessEngine(nullptr); }

  size_t num_requests() const { return engine_->requests.size(); }

  /// The next `Submit` calls fail with this; OK: they succeed.
  void RefuseWith(Status status) { engine_->refusal = std::move(status); }

  /// Ends the oldest request: by a copy, or with an error and no bytes moved.
  void FinishNext(const Status& status = OkStatus()) {
    engine::Request request = std::move(engine_->requests.front());
    engine_->requests.erase(engine_->requests.begin());
    if (status.ok()) std::memcpy(request.dst, request.src, request.size_bytes);
    request.done(status);
  }

 private:
  struct Impl : engine::Engine {
    StatusOr<sched::TransferId> Submit(engine::Request request) override {
      if (!refusal.ok()) return refusal;
      requests.push_back(std::move(request));
      return static_cast<sched::TransferId>(requests.size());
    }
    Status Cancel(sched::TransferId) override { return OkStatus(); }
    void Abort(Status) override {}
    engine::Stats GetStats() const override { return {}; }
    std::vector<engine::TraceEvent> Trace() const override { return {}; }

    std::vector<engine::Request> requests;
    Status refusal;
  };

  std::shared_ptr<Impl> engine_;
};

}  // namespace turbobus::offload

#endif  // TURBOBUS_OFFLOAD_MANUAL_ENGINE_H_

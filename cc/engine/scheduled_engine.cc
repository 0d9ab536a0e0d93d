#include "engine/scheduled_engine.h"

#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/thread.h"
#include "engine/completion.h"
#include "engine/driver.h"
#include "engine/engine.h"
#include "engine/fork.h"

namespace turbobus::engine {
namespace {

// What the control thread is asked to do, in the order of asking.
struct Command {
  enum class Kind : uint8_t { kSubmit, kCancel, kAbort };

  Kind kind = Kind::kSubmit;
  sched::TransferId transfer = 0;
  Request request{};
  int64_t submitted_ns = 0;
  Status reason{};
};

class ScheduledEngine final : public Engine {
 public:
  ScheduledEngine(std::unique_ptr<sched::Scheduler> scheduler,
                  std::unique_ptr<transport::Transport> transport,
                  std::unique_ptr<CompletionThreads> completions,
                  double late_factor, Options options)
      : transport_(std::move(transport)),
        completions_(std::move(completions)),
        recorder_(transport_->paths(), late_factor, std::move(options),
                  transport_->NowNs()),
        driver_(
            std::move(scheduler), *transport_, recorder_,
            [this](std::function<void(Status)> done, Status status) {
              if (!done) return;
              completions_->Run([done = std::move(done),
                                 status = std::move(status)] { done(status); });
            }) {}

  Status Start() {
    TB_ASSIGN_OR_RETURN(control_, StartThread("tb-control", [this] { Run(); }));
    return OkStatus();
  }

  ~ScheduledEngine() override {
    if (!control_.joinable()) return;  // was never started
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    transport_->Wake();
    control_.join();
    completions_->Drain();
  }

  StatusOr<sched::TransferId> Submit(Request request) override {
    TB_RETURN_IF_ERROR(Check(request));
    if (request.numa_node == kNearestNumaNode) {
      request.numa_node = NearestNumaNode(request);
    }
    const int64_t now_ns = transport_->NowNs();
    sched::TransferId id = 0;
    {
      const std::lock_guard lock(mutex_);
      if (abort_reason_) return *abort_reason_;
      id = next_id_++;
      recorder_.OnSubmit();
      Command& command = commands_.emplace_back();
      command.kind = Command::Kind::kSubmit;
      command.transfer = id;
      command.request = std::move(request);
      command.submitted_ns = now_ns;
      if (commands_.size() > 1)
        return id;  // The thread has been woken for these.
    }
    transport_->Wake();
    return id;
  }

  Status Cancel(sched::TransferId transfer) override {
    {
      const std::lock_guard lock(mutex_);
      if (transfer <= 0 || transfer >= next_id_) {
        return NotFound("transfer: no transfer " + std::to_string(transfer) +
                        " was ever submitted");
      }
      Command& command = commands_.emplace_back();
      command.kind = Command::Kind::kCancel;
      command.transfer = transfer;
    }
    transport_->Wake();
    return OkStatus();
  }

  void Abort(Status reason) override {
    if (reason.ok()) reason = Cancelled("the engine was aborted");
    {
      const std::lock_guard lock(mutex_);
      if (!abort_reason_) abort_reason_ = reason;
      Command& command = commands_.emplace_back();
      command.kind = Command::Kind::kAbort;
      command.reason = std::move(reason);
    }
    transport_->Wake();
  }

  Stats GetStats() const override { return recorder_.Get(transport_->NowNs()); }
  std::vector<TraceEvent> Trace() const override { return recorder_.Trace(); }

 private:
  void Run() {
    while (true) {
      std::vector<Command> commands;
      bool is_stopping = false;
      {
        const std::lock_guard lock(mutex_);
        commands.swap(commands_);
        is_stopping = is_stopping_;
      }
      for (Command& command : commands) Apply(std::move(command));
      driver_.Issue();
      if (is_stopping && driver_.is_idle()) return;
      driver_.WaitAndCollect();
    }
  }

  void Apply(Command command) {
    switch (command.kind) {
      case Command::Kind::kSubmit:
        driver_.Submit(command.transfer, std::move(command.request),
                       command.submitted_ns);
        break;
      case Command::Kind::kCancel:
        driver_.Cancel(command.transfer);
        break;
      case Command::Kind::kAbort:
        driver_.FailAll(command.reason);
        break;
    }
  }

  Status Check(const Request& request) const {
    if (request.size_bytes < 0) {
      return InvalidArgument("size_bytes: expected at least 0, got " +
                             std::to_string(request.size_bytes));
    }
    if (request.size_bytes > 0 &&
        (request.src == nullptr || request.dst == nullptr)) {
      return InvalidArgument(
          std::string(request.src == nullptr ? "src" : "dst") +
          ": expected the address of " + std::to_string(request.size_bytes) +
          " bytes, got null");
    }
    bool knows_gpu = false;
    for (const topo::Path& path : transport_->paths()) {
      if (path.gpu != request.gpu || path.direction != request.direction)
        continue;
      knows_gpu = true;
      if (request.numa_node == kNearestNumaNode ||
          request.numa_node == path.numa_node) {
        return OkStatus();
      }
    }
    if (knows_gpu) {
      return InvalidArgument("numa_node: no lane of gpu " +
                             std::to_string(request.gpu) + " reaches node " +
                             std::to_string(request.numa_node));
    }
    return InvalidArgument(
        "gpu: no lane serves gpu " + std::to_string(request.gpu) +
        "; the topology has fewer GPUs than there are devices in "
        "use, or they have no link in this direction");
  }

  // A GPU's direct lanes come in the order of the transport, nearest node
  // first.
  int NearestNumaNode(const Request& request) const {
    for (const topo::Path& path : transport_->paths()) {
      if (path.gpu == request.gpu && path.direction == request.direction &&
          !path.is_relay()) {
        return path.numa_node;
      }
    }
    return 0;
  }

  const std::unique_ptr<transport::Transport> transport_;
  const std::unique_ptr<CompletionThreads> completions_;
  Recorder recorder_;
  Driver driver_;  // the control thread's alone

  std::mutex mutex_;
  std::vector<Command> commands_;
  std::optional<Status> abort_reason_;
  sched::TransferId next_id_ = 1;
  bool is_stopping_ = false;

  std::thread control_;
};

/// What users hold: an engine in the process that made it, a husk in its
/// children.
class ForkSafeEngine final : public Engine {
 public:
  explicit ForkSafeEngine(std::unique_ptr<ScheduledEngine> engine)
      : engine_(std::move(engine)), generation_(ForkGeneration()) {}

  ~ForkSafeEngine() override {
    // Its threads are not here to be joined; the copy's memory is let go.
    if (is_copy()) static_cast<void>(engine_.release());
  }

  StatusOr<sched::TransferId> Submit(Request request) override {
    if (is_copy()) return CopyError();
    return engine_->Submit(std::move(request));
  }
  Status Cancel(sched::TransferId transfer) override {
    return is_copy() ? CopyError() : engine_->Cancel(transfer);
  }
  void Abort(Status reason) override {
    if (!is_copy()) engine_->Abort(std::move(reason));
  }
  Stats GetStats() const override {
    return is_copy() ? Stats() : engine_->GetStats();
  }
  std::vector<TraceEvent> Trace() const override {
    return is_copy() ? std::vector<TraceEvent>() : engine_->Trace();
  }

 private:
  bool is_copy() const { return ForkGeneration() != generation_; }

  static Status CopyError() {
    return FailedPrecondition(
        "this process is a fork of the one that made the engine, and has none "
        "of "
        "its threads; make a new engine here, or start processes with spawn");
  }

  std::unique_ptr<ScheduledEngine> engine_;
  const uint64_t generation_;
};

}  // namespace

StatusOr<std::unique_ptr<Engine>> CreateEngine(
    std::unique_ptr<sched::Scheduler> scheduler,
    std::unique_ptr<transport::Transport> transport, double late_factor,
    Options options) {
  TB_ASSIGN_OR_RETURN(std::unique_ptr<CompletionThreads> completions,
                      CompletionThreads::Create());
  auto engine = std::make_unique<ScheduledEngine>(
      std::move(scheduler), std::move(transport), std::move(completions),
      late_factor, std::move(options));
  TB_RETURN_IF_ERROR(engine->Start());
  return std::unique_ptr<Engine>(
      std::make_unique<ForkSafeEngine>(std::move(engine)));
}

}  // namespace turbobus::engine

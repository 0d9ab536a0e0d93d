#include "python/transfer.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "python/bindings.h"

namespace turbobus::python {

namespace py = pybind11;
using std::chrono::steady_clock;

/// How a transfer ended; what its callback and its waiter share.
class PyTransfer::Outcome {
 public:
  void Set(Status status) {
    {
      const std::lock_guard lock(mutex_);
      status_ = std::move(status);
    }
    changed_.notify_all();
  }

  std::optional<Status> WaitUntil(steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [this] { return status_.has_value(); });
    return status_;
  }

  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return status_.has_value(); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Status> status_;
};

PyTransfer::PyTransfer(std::shared_ptr<engine::Engine> engine, int gpu,
                       topo::Direction direction, const py::buffer& src,
                       const py::buffer& dst, int numa_node)
    : engine_(std::move(engine)),
      src_(src.request()),
      dst_(dst.request(/*writable=*/true)),
      outcome_(std::make_shared<Outcome>()) {
  const int64_t size_bytes = src_.size * src_.itemsize;
  if (dst_.size * dst_.itemsize != size_bytes) {
    throw py::value_error("dst: expected " + std::to_string(size_bytes) +
                          " bytes as in src, got " +
                          std::to_string(dst_.size * dst_.itemsize));
  }
  if (!PyBuffer_IsContiguous(src_.view(), 'C') ||
      !PyBuffer_IsContiguous(dst_.view(), 'C')) {
    throw py::value_error("src, dst: expected contiguous buffers");
  }
  engine::Request request;
  request.gpu = gpu;
  request.direction = direction;
  request.src = src_.ptr;
  request.dst = dst_.ptr;
  request.size_bytes = size_bytes;
  request.numa_node = numa_node;
  request.done = [outcome = outcome_](Status status) {
    outcome->Set(std::move(status));
  };
  id_ = ValueOrRaise(engine_->Submit(std::move(request)));
}

PyTransfer::~PyTransfer() {
  if (id_ == 0) return;
  const py::gil_scoped_release release;
  // The buffers must not go while somebody writes to them. In the child of a
  // fork nobody does.
  if (!is_in_child()) outcome_->Wait();
  engine_.reset();
}

bool PyTransfer::Wait(std::optional<double> timeout_s) {
  if (is_in_child()) {
    RaiseIfError(
        FailedPrecondition("the transfer was started before a fork; its "
                           "engine is in the parent process"));
  }
  const auto start = steady_clock::now();
  while (true) {
    // In slices, so that Ctrl-C gets through.
    auto deadline = steady_clock::now() + std::chrono::milliseconds(100);
    bool is_last = false;
    if (timeout_s) {
      const auto end =
          start + std::chrono::duration_cast<steady_clock::duration>(
                      std::chrono::duration<double>(*timeout_s));
      is_last = end <= deadline;
      deadline = std::min(end, deadline);
    }
    std::optional<Status> status;
    {
      const py::gil_scoped_release release;
      status = outcome_->WaitUntil(deadline);
    }
    if (status) {
      RaiseIfError(*status);
      return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (is_last) return false;
  }
}

bool PyTransfer::is_done() {
  return !is_in_child() && outcome_->WaitUntil({}).has_value();
}

void PyTransfer::Cancel() { RaiseIfError(engine_->Cancel(id_)); }

}  // namespace turbobus::python

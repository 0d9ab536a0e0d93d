#ifndef TURBOBUS_PYTHON_TRANSFER_H_
#define TURBOBUS_PYTHON_TRANSFER_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "engine/engine.h"
#include "engine/fork.h"
#include "sched/scheduler.h"
#include "topo/path.h"

namespace turbobus::python {

/// A transfer between two buffers of Python's, which it holds until it is over:
/// the destructor waits for that. Callers hold the GIL; what waits lets it go.
class PyTransfer {
 public:
  /// Starts it. Raises what is wrong with the buffers, or what the engine says.
  PyTransfer(std::shared_ptr<engine::Engine> engine, int gpu,
             topo::Direction direction, const pybind11::buffer& src,
             const pybind11::buffer& dst, int numa_node);
  ~PyTransfer();
  PyTransfer(const PyTransfer&) = delete;
  PyTransfer& operator=(const PyTransfer&) = delete;

  /// Raises what the transfer ended with; false if it is not over in time.
  bool Wait(std::optional<double> timeout_s);
  bool is_done();
  void Cancel();
  sched::TransferId id() const { return id_; }

 private:
  class Outcome;

  bool is_in_child() const { return engine::ForkGeneration() != generation_; }

  const uint64_t generation_ = engine::ForkGeneration();
  std::shared_ptr<engine::Engine> engine_;
  pybind11::buffer_info src_;
  pybind11::buffer_info dst_;
  const std::shared_ptr<Outcome> outcome_;
  sched::TransferId id_ = 0;
};

}  // namespace turbobus::python

#endif  // TURBOBUS_PYTHON_TRANSFER_H_

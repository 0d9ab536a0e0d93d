#ifndef TURBOBUS_PYTHON_BINDINGS_H_
#define TURBOBUS_PYTHON_BINDINGS_H_

#include <pybind11/pybind11.h>

#include <vector>

#include "base/status.h"
#include "moe/traffic.h"

namespace turbobus::python {

/// Raises the Python exception that `status` maps to (jax_turbobus/errors.py);
/// returns if it is OK. The caller holds the GIL.
void RaiseIfError(const Status& status);

template <typename T>
T ValueOrRaise(StatusOr<T> result) {
  RaiseIfError(result.status());
  return std::move(result).value();
}

/// One dict for each kind of exchange; bytes[from][to].
pybind11::list ToList(const std::vector<moe::Traffic>& traffic);

void BindTopo(pybind11::module_& module);
void BindSched(pybind11::module_& module);
void BindEngine(pybind11::module_& module);
void BindMoe(pybind11::module_& module);

}  // namespace turbobus::python

#endif  // TURBOBUS_PYTHON_BINDINGS_H_

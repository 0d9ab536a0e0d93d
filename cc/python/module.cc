#include <pybind11/pybind11.h>

#include <string>

#include "ffi/targets.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace turbobus::python {
namespace {

/// The exception class in jax_turbobus/errors.py for a status code.
const char* ExceptionName(StatusCode code) {
  switch (code) {
    case StatusCode::kUnavailable:
      return "DaemonUnavailableError";
    case StatusCode::kDeadlineExceeded:
      return "TransferTimeoutError";
    case StatusCode::kResourceExhausted:
      return "PoolExhaustedError";
    default:
      return "TurboBusError";
  }
}

py::dict FfiTargets() {
  py::dict targets;
  for (const ffi::Target& target : ffi::Targets()) {
    py::dict stages;
    stages["execute"] = py::capsule(reinterpret_cast<void*>(target.execute));
    targets[target.name] = stages;
  }
  return targets;
}

}  // namespace

void RaiseIfError(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kInvalidArgument ||
      status.code() == StatusCode::kOutOfRange) {
    throw py::value_error(status.message());
  }
  const py::object error =
      py::module_::import("jax_turbobus.errors")
          .attr(ExceptionName(status.code()))(
              status.message(),
              py::arg("code") = std::string(StatusCodeName(status.code())));
  PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  throw py::error_already_set();
}

PYBIND11_MODULE(_core, module) {
  module.doc() = "C++ core of jax_turbobus; use it through the package.";
  module.attr("ffi_api_version") =
      py::make_tuple(ffi::kApiVersionMajor, ffi::kApiVersionMinor);
  module.def("ffi_targets", &FfiTargets,
             "XLA FFI handlers by target name: {name: {stage: capsule}}.");
  BindTopo(module);
  BindSched(module);
  BindEngine(module);
  BindMoe(module);
}

}  // namespace turbobus::python

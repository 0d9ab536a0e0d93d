#include <pybind11/pybind11.h>

#include <string>

#include "python/bindings.h"

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

}  // namespace

void RaiseIfError(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kInvalidArgument ||
      status.code() == StatusCode::kOutOfRange) {
    throw pybind11::value_error(status.message());
  }
  const pybind11::object error =
      pybind11::module_::import("jax_turbobus.errors")
          .attr(ExceptionName(status.code()))(
              status.message(), pybind11::arg("code") =
                                    std::string(StatusCodeName(status.code())));
  PyErr_SetObject(pybind11::type::handle_of(error).ptr(), error.ptr());
  throw pybind11::error_already_set();
}

}  // namespace turbobus::python

#include <pybind11/pybind11.h>

#include "ffi/targets.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace turbobus::python {
namespace {

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

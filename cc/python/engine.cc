#include "python/bindings.h"

namespace turbobus::python {

void BindEngine(pybind11::module_& module) { static_cast<void>(module); }

}  // namespace turbobus::python

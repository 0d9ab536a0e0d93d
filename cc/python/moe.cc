#include "python/bindings.h"

namespace turbobus::python {

void BindMoe(pybind11::module_& module) { static_cast<void>(module); }

}  // namespace turbobus::python

#ifndef TURBOBUS_PYTHON_CUDA_SETTINGS_H_
#define TURBOBUS_PYTHON_CUDA_SETTINGS_H_

#include <pybind11/pybind11.h>

#include "engine/stream_settings.h"

namespace turbobus::python {

/// `settings` with those that `values` has by name; raises ValueError if it has
/// others, or a name that an enum has not. The caller holds the GIL.
engine::StreamSettings Changed(engine::StreamSettings settings,
                               const pybind11::dict& values);

/// All of them by name, as `Changed` takes them.
pybind11::dict ToDict(engine::StreamSettings settings);

}  // namespace turbobus::python

#endif  // TURBOBUS_PYTHON_CUDA_SETTINGS_H_

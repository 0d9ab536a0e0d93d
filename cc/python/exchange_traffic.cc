#include "python/bindings.h"

namespace py = pybind11;

namespace turbobus::python {

py::list ToList(const std::vector<moe::Traffic>& traffic) {
  py::list kinds;
  for (const moe::Traffic& one : traffic) {
    py::list bytes;
    for (int from = 0; from < one.num_ranks; ++from) {
      py::list row;
      for (int to = 0; to < one.num_ranks; ++to) {
        row.append(one.bytes[from * one.num_ranks + to]);
      }
      bytes.append(row);
    }
    py::dict kind;
    kind["op"] = one.op;
    kind["schedule"] = moe::ScheduleName(one.schedule);
    kind["path"] = one.path;
    kind["num_ranks"] = one.num_ranks;
    kind["num_calls"] = one.num_calls;
    kind["bytes"] = bytes;
    kinds.append(kind);
  }
  return kinds;
}

}  // namespace turbobus::python

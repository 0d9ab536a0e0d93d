#include <chrono>
#include <cmath>

#include "moe/rendezvous.h"
#include "moe/traffic.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace turbobus::python {
namespace {

void SetExchangeTimeout(double seconds) {
  if (!(seconds > 0) || seconds > 1e9) {
    RaiseIfError(InvalidArgument("seconds: expected a positive number, got " +
                                 std::to_string(seconds)));
  }
  moe::Rendezvous::Process().set_timeout(
      std::chrono::milliseconds(std::llround(std::ceil(seconds * 1e3))));
}

double ExchangeTimeout() {
  return moe::Rendezvous::Process().timeout().count() * 1e-3;
}

}  // namespace

void BindMoe(py::module_& module) {
  module.def("set_exchange_timeout", &SetExchangeTimeout, py::arg("seconds"),
             "How long a rank waits for the others of a call.");
  module.def("exchange_timeout", &ExchangeTimeout, "In seconds.");
  module.def(
      "num_open_exchanges",
      [] { return moe::Rendezvous::Process().num_open(); },
      "Calls that some rank waits in, for tests and diagnosis.");
  module.def(
      "exchange_traffic",
      [] { return ToList(moe::TrafficLog::Process().Read()); },
      "What exchanges have moved between ranks since the last reset.");
  module.def(
      "reset_exchange_traffic", [] { moe::TrafficLog::Process().Reset(); },
      "Starts the counts of exchange_traffic again.");
}

}  // namespace turbobus::python

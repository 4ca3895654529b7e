// The Python module dflash_moe._simulation, which is for `dflash-moe simulate` alone. It has client
// and worker of its own, whose symbols are hidden, beside those of _core.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "simulation/simulation.h"

namespace py = pybind11;

namespace dflash::simulation {
namespace {

// By name, without zeros.
std::map<std::string, uint64_t> faults_of(const Report& report) {
  std::map<std::string, uint64_t> named;
  for (size_t kind = 0; kind < kNumFaultKinds; ++kind) {
    if (report.faults[kind] > 0)
      named[fault_name(static_cast<FaultKind>(kind))] = report.faults[kind];
  }
  return named;
}

// By the number of base/error_code.h, without zeros.
std::map<size_t, uint64_t> failed_of(const Report& report) {
  std::map<size_t, uint64_t> failed;
  for (size_t code = 0; code < kNumErrorCodes; ++code) {
    if (report.calls.failed[code] > 0) failed[code] = report.calls.failed[code];
  }
  return failed;
}

Report simulate_unlocked(uint64_t seed, double seconds) {
  const py::gil_scoped_release unlocked;
  return simulate(seed, static_cast<int64_t>(seconds * 1e9));
}

}  // namespace
}  // namespace dflash::simulation

PYBIND11_MODULE(_simulation, module) {
  using dflash::simulation::Report;
  module.doc() = "The real client and the real worker in virtual time.";
  py::class_<Report>(module, "Report")
      .def_readonly("event_hash", &Report::event_hash)
      .def_readonly("num_events", &Report::num_events)
      .def_property_readonly(
          "virtual_s",
          [](const Report& self) { return static_cast<double>(self.virtual_ns) * 1e-9; })
      .def_property_readonly("num_calls", [](const Report& self) { return self.calls.calls; })
      .def_property_readonly("num_succeeded",
                             [](const Report& self) { return self.calls.succeeded; })
      .def_property_readonly("num_abandoned",
                             [](const Report& self) { return self.calls.abandoned; })
      .def_property_readonly("failed", &dflash::simulation::failed_of)
      .def_property_readonly("faults", &dflash::simulation::faults_of)
      .def_readonly("violations", &Report::violations)
      .def_readonly("options", &Report::options)
      .def_readonly("last_events", &Report::last_events);
  module.def("simulate", &dflash::simulation::simulate_unlocked, py::arg("seed"),
             py::arg("seconds"));
}

// Binds the clock of a thread's operators, for benches.
// SPDX-License-Identifier: Apache-2.0
#include "base/operator_clock.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace dflash::bindings {

void bind_operator_clock(py::module_& module) {
  py::class_<OperatorTimes>(module, "OperatorTimes",
                            "What the clock found of one operator, or of one packed matrix.")
      .def_property_readonly("operator",
                             [](const OperatorTimes& self) { return operator_name(self.which); })
      .def_property_readonly(
          "subject",
          [](const OperatorTimes& self) { return reinterpret_cast<uintptr_t>(self.subject); },
          "The address of the packed matrix, the first one of those in one call; else 0.")
      .def_property_readonly("calls", [](const OperatorTimes& self) { return self.num_calls; })
      .def_property_readonly(
          "own_ns", [](const OperatorTimes& self) { return self.own_ns; },
          "The time inside it, without the operators that it calls.")
      .def_property_readonly(
          "lost_ns", [](const OperatorTimes& self) { return self.lost_ns; },
          "Of that, what jobs of a pool took beyond their tasks evenly shared by all threads.")
      .def_property_readonly(
          "bytes", [](const OperatorTimes& self) { return self.num_bytes; },
          "Of weights, keys and values that it read.")
      .def_property_readonly("multiply_adds",
                             [](const OperatorTimes& self) { return self.num_multiply_adds; })
      .def_property_readonly(
          "numerics", [](const OperatorTimes& self) { return self.numerics; },
          "The numerics class of the multiply-adds; empty where there are none.");
  module.def("start_operator_clock", &OperatorClock::start,
             "Has this thread's operators timed from now on, from zero. `outside` is all that is "
             "no operator, so that the times add up to the time from start to stop.");
  module.def("stop_operator_clock", &OperatorClock::stop,
             "Ends that, and returns what was found; nothing where the clock does not run.");
}

}  // namespace dflash::bindings

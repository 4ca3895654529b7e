// The Python module dflash_moe._simulation, which is for `dflash-moe simulate` alone. It has client
// and worker of its own, whose symbols are hidden, beside those of _core.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "simulation/simulation.h"

namespace py = pybind11;

namespace dflash::simulation {
namespace {

// By name, without zeros.
std::map<std::string, uint64_t> faults_of(const Report& report) {
  std::map<std::string, uint64_t> named;
  for (size_t kind = 0; kind < kNumSimulatedFaults; ++kind) {
    if (report.faults[kind] > 0)
      named[fault_name(static_cast<SimulatedFault>(kind))] = report.faults[kind];
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

// What an event of a worker is answered: (orders, state, is_coming, attempt), where an order is
// (what, attempt, seconds from the beginning).
using Answer = py::typing::Tuple<py::typing::List<py::typing::Tuple<py::str, py::int_, py::float_>>,
                                 py::str, py::bool_, py::int_>;
// It is told the worker, what happened, the attempt, the reason, whether a process died, and when.
using Members =
    py::typing::Callable<Answer(py::int_, py::str, py::int_, py::str, py::bool_, py::float_)>;
using MakeMembers = py::typing::Callable<Members(py::int_, py::typing::List<py::bool_>,
                                                 py::typing::Tuple<py::float_, py::float_>)>;

// The product's state machines, which are Python. What they raise is kept, because nothing may be
// thrown through the core, and every later event is answered by nothing.
class PythonMembership final : public Membership {
 public:
  PythonMembership(const py::object& make, uint64_t seed, const Options& options,
                   std::string& failure)
      : failure_(failure) {
    const py::gil_scoped_acquire locked;
    std::vector<bool> are_started_by_host;
    for (const SimulatedWorkerOptions& worker : options.workers) {
      if (!worker.is_last_resort) are_started_by_host.push_back(worker.is_started_by_host);
    }
    try {
      on_ = make(seed, are_started_by_host,
                 py::make_tuple(seconds(options.backoff_ns[0]), seconds(options.backoff_ns[1])));
    } catch (const py::error_already_set& error) {
      failure_ = error.what();
    }
  }
  ~PythonMembership() override {
    const py::gil_scoped_acquire locked;
    on_ = py::object();
  }
  PythonMembership(const PythonMembership&) = delete;
  PythonMembership& operator=(const PythonMembership&) = delete;

  MemberDecision on(const MemberEvent& event, int64_t now_ns) override {
    MemberDecision decision;
    if (!failure_.empty()) return decision;
    const py::gil_scoped_acquire locked;
    try {
      const py::tuple answer = on_(event.worker, happening_name(event.what), event.attempt,
                                   event.reason, event.is_death, seconds(now_ns));
      for (const py::handle order : answer[0]) {
        const auto fields = py::cast<py::tuple>(order);
        // Later by what rounding may have taken, so that the time has come when it is said to have.
        decision.orders.push_back({py::cast<std::string>(fields[0]), py::cast<uint64_t>(fields[1]),
                                   static_cast<int64_t>(py::cast<double>(fields[2]) * 1e9) + 1000});
      }
      decision.state = py::cast<std::string>(answer[1]);
      decision.is_coming = py::cast<bool>(answer[2]);
      decision.attempt = py::cast<uint64_t>(answer[3]);
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    return decision;
  }

 private:
  static double seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

  py::object on_;
  std::string& failure_;
};

Report simulate_with(uint64_t seed, double seconds, const MakeMembers& make_members) {
  std::string failure;
  Report report;
  {
    const py::gil_scoped_release unlocked;
    report = simulate(seed, static_cast<int64_t>(seconds * 1e9),
                      [&](uint64_t of_seed, const Options& options) -> std::unique_ptr<Membership> {
                        return std::make_unique<PythonMembership>(make_members, of_seed, options,
                                                                  failure);
                      });
  }
  if (!failure.empty()) throw std::runtime_error("the membership failed: " + failure);
  return report;
}

}  // namespace
}  // namespace dflash::simulation

PYBIND11_MODULE(_simulation, module) {
  using dflash::simulation::Report;
  module.doc() =
      "The real client and the real worker loop in virtual time (csrc/simulation). Only "
      "`dflash-moe "
      "simulate` imports it.";
  py::class_<Report>(module, "Report", "What one seed did.")
      .def_readonly("event_hash", &Report::event_hash,
                    "Equal for every run of the seed with the same code.")
      .def_readonly("num_events", &Report::num_events)
      .def_property_readonly(
          "virtual_s",
          [](const Report& self) { return static_cast<double>(self.virtual_ns) * 1e-9; })
      .def_readonly("num_hosts", &Report::num_hosts, "One, or two that share all workers.")
      .def_property_readonly(
          "num_batches", [](const Report& self) { return self.batches.batches; },
          "How many batches the workers have computed.")
      .def_property_readonly(
          "num_shared_batches",
          [](const Report& self) { return self.batches.sessions - self.batches.batches; },
          "How many of them had rows of both hosts.")
      .def_property_readonly("num_calls", [](const Report& self) { return self.calls.calls; })
      .def_property_readonly("num_succeeded",
                             [](const Report& self) { return self.calls.succeeded; })
      .def_property_readonly("num_abandoned",
                             [](const Report& self) { return self.calls.abandoned; })
      .def_property_readonly(
          "failed", &dflash::simulation::failed_of,
          "How many calls ended with each code of csrc/base/error_code.h, without zeros.")
      .def_property_readonly("faults", &dflash::simulation::faults_of,
                             "How often each kind of fault was injected, without zeros.")
      .def_readonly("violations", &Report::violations,
                    "The rules that were broken, each with its time; empty where all were kept.")
      .def_readonly("options", &Report::options, "What the seed drew.")
      .def_readonly(
          "last_events", &Report::last_events,
          "At most 200, oldest first: those before the first violation, or before the end.");
  module.def("simulate", &dflash::simulation::simulate_with, py::arg("seed"), py::arg("seconds"),
             py::arg("make_members"),
             "Things break for `seconds` of virtual time. `make_members` takes the seed, whether "
             "the host starts each worker's process, and the first and the longest pause between "
             "two tries in seconds; it is called for each process of a host. Releases the GIL but "
             "for the calls of what it makes; RuntimeError where these raise.");
}

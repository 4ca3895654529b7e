// Binds what `bench ipc` measures; see measure/round_trip.h.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "measure/round_trip.h"

namespace py = pybind11;

namespace dflash::measure {
namespace {

using bindings::ChannelBox;
using bindings::unwrap;

int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

std::vector<int64_t> ipc_round_trip(ChannelBox& box, size_t payload_bytes, uint32_t rounds,
                                    uint32_t warmup, int64_t spin_ns, double timeout_s, int cpu) {
  const auto channel = box.take();
  const RoundTripOptions options{payload_bytes,          rounds, warmup, spin_ns,
                                 nanoseconds(timeout_s), cpu};
  Result<std::vector<int64_t>> samples = [&] {
    py::gil_scoped_release unlocked;
    return round_trip(*channel, options);
  }();
  return unwrap(std::move(samples));
}

uint64_t ipc_echo(ChannelBox& box, int64_t spin_ns, double idle_timeout_s, int cpu) {
  const auto channel = box.take();
  Result<uint64_t> rounds = [&] {
    py::gil_scoped_release unlocked;
    return echo(*channel, spin_ns, nanoseconds(idle_timeout_s), cpu);
  }();
  return unwrap(std::move(rounds));
}

std::vector<int64_t> ipc_floor(const std::string& kind, size_t payload_bytes, uint32_t rounds,
                               uint32_t warmup, std::pair<int, int> cpus,
                               const std::string& habit) {
  const FloorOptions options{
      unwrap(parse_floor_kind(kind)),   payload_bytes, rounds, warmup, cpus.first, cpus.second,
      unwrap(parse_socket_habit(habit))};
  Result<std::vector<int64_t>> samples = [&] {
    py::gil_scoped_release unlocked;
    return floor_round_trip(options);
  }();
  return unwrap(std::move(samples));
}

std::vector<double> ipc_memcpy(size_t payload_bytes, uint32_t rounds, int cpu) {
  Result<std::vector<double>> samples = [&] {
    py::gil_scoped_release unlocked;
    return memcpy_bytes_per_s(payload_bytes, rounds, cpu);
  }();
  return unwrap(std::move(samples));
}

}  // namespace

void bind_ipc(py::module_& module) {
  module.def("ipc_round_trip", &ipc_round_trip, py::arg("channel"), py::arg("payload_bytes"),
             py::arg("rounds"), py::arg("warmup"), py::arg("spin_ns"), py::arg("timeout_s"),
             py::arg("cpu") = -1,
             "Returns the nanoseconds of each round trip: copy in, publish, wait, copy out. The "
             "other end, a thread or a process, runs `ipc_echo`.");
  module.def("ipc_echo", &ipc_echo, py::arg("channel"), py::arg("spin_ns"),
             py::arg("idle_timeout_s"), py::arg("cpu") = -1,
             "Copies each request to its reply, and returns the number of rounds.");
  module.def(
      "ipc_floor", &ipc_floor, py::arg("kind"), py::arg("payload_bytes"), py::arg("rounds"),
      py::arg("warmup"), py::arg("cpus"), py::arg("habit") = "bare",
      "Returns the nanoseconds of each round of a raw ping-pong. `kind` is spin, futex, "
      "unix, tcp, tls or fabric. `habit` says what sockets do beyond one write and one read: bare, "
      "two reads or polls.");
  module.def("memcpy_bytes_per_s", &ipc_memcpy, py::arg("payload_bytes"), py::arg("rounds"),
             py::arg("cpu") = -1);
}

}  // namespace dflash::measure

// Binds the thread pool that a host's operators, its own experts and its encoding share.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/boxes.h"
#include "bindings/errors.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

HostPoolBox make_pool(uint32_t num_threads, const std::vector<int>& cpus, int64_t spin_ns,
                      const std::string& isa) {
  const compute::Isa set = unwrap(compute::parse_isa(isa));
  auto pool = unwrap(compute::ThreadPool::create(num_threads, cpus, spin_ns));
  using Scratch = compute::ScratchPool<compute::ScratchBlock>;
  return {std::shared_ptr<compute::ThreadPool>(pool.release(), DeleteInOwnProcess()), set,
          std::make_shared<compute::PageArena>(),
          std::shared_ptr<Scratch>(new Scratch(), DeleteInOwnProcess())};
}

}  // namespace

void bind_host_pool(py::module_& module) {
  py::class_<HostPoolBox, std::shared_ptr<HostPoolBox>>(
      module, "HostPool",
      "The compute threads that a host's operators share; the caller is one of them. Any thread "
      "may call an operator, and jobs run one at a time, first come, first served. ConfigError for "
      "threads, a CPU or a kernel set that cannot be had.")
      .def(py::init([](uint32_t threads, const std::vector<int>& cpus, int64_t spin_ns,
                       const std::string& isa) {
             return std::make_shared<HostPoolBox>(make_pool(threads, cpus, spin_ns, isa));
           }),
           py::kw_only(), py::arg("threads"), py::arg("cpus") = std::vector<int>{},
           py::arg("spin_ns") = 0, py::arg("isa"))
      .def_property_readonly("threads",
                             [](const HostPoolBox& self) { return self.pool->num_threads(); })
      .def_property_readonly("isa",
                             [](const HostPoolBox& self) { return compute::isa_name(self.isa); });
}

}  // namespace dflash::bindings

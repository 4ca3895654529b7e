// Binds backends: what `doctor` lists, and an opened device for a worker or a self-test.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/errors.h"
#include "bindings/typed.h"
#include "plugin/loader.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

Fields listing_dict(const plugin::DeviceListing& listing) {
  Fields fields;
  fields["name"] = listing.name;
  fields["vendor"] = listing.vendor;
  fields["arch"] = listing.arch;
  fields["memory_bytes"] = listing.memory_bytes;
  fields["reason"] = listing.reason;
  return fields;
}

// Returns {"built": bool, "reason": str, "devices": [...]}, with the "directory" of the plug-in
// where no package was refused, and never raises for what is missing.
Fields probe_backend(const std::string& name) {
  Fields found;
  found["built"] = false;
  found["devices"] = py::list();
  found["reason"] = "";
  std::string directory;
  try {
    directory = plugin_directory(name);
  } catch (py::error_already_set& error) {
    found["reason"] = py::str(error.value());
    return found;
  }
  Result<const dflash_backend_table*> table = plugin::load_backend(name, directory);
  found["directory"] = directory;
  if (!table.ok()) {
    if (table.error().code == ErrorCode::kInvalidArgument) raise(table.error());
    found["reason"] = table.error().message;
    return found;
  }
  found["built"] = true;
  Result<std::vector<plugin::DeviceListing>> devices = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    devices = plugin::list_devices(*table.value());
  }
  if (!devices.ok()) {
    found["reason"] = devices.error().message;
    return found;
  }
  py::list listed;
  for (const plugin::DeviceListing& listing : devices.value()) listed.append(listing_dict(listing));
  found["devices"] = listed;
  return found;
}

// Returns the device of a simulating backend that stands for this vendor's cards.
uint32_t simulated_device(const dflash_backend_table& table, const std::string& vendor) {
  const std::vector<plugin::DeviceListing> devices = unwrap(plugin::list_devices(table));
  for (uint32_t index = 0; index < devices.size(); ++index) {
    if (devices[index].vendor == vendor) return index;
  }
  raise(Error{ErrorCode::kUnsupported, std::string("backend ") + table.name + " simulates no '" +
                                           vendor + "'; it simulates cuda and hip"});
}

BackendDevice open_device(const std::string& backend, uint32_t device, const std::string& simulate,
                          uint32_t num_threads, uint64_t seed) {
  const dflash_backend_table& table =
      *unwrap(plugin::load_backend(backend, plugin_directory(backend)));
  if (!simulate.empty()) device = simulated_device(table, simulate);
  Result<std::unique_ptr<plugin::PluginBackend>> opened = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    opened = plugin::PluginBackend::open(table, device, plugin::OpenOptions{num_threads, seed});
  }
  return BackendDevice{std::shared_ptr<plugin::PluginBackend>(unwrap(std::move(opened)))};
}

std::vector<std::string> classes_of(const BackendDevice& self) {
  std::vector<std::string> names;
  for (const compute::NumericsFacts& facts : compute::numerics_table()) {
    if (self.backend->computes(facts.numerics)) names.emplace_back(facts.name);
  }
  return names;
}

Fields self_test(const BackendDevice& self, uint32_t test_case) {
  Result<plugin::SelfTestResult> tested = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    tested = self.backend->self_test(test_case);
  }
  const plugin::SelfTestResult result = unwrap(std::move(tested));
  Fields fields;
  fields["num_cases"] = result.num_cases;
  fields["elements"] = result.elements;
  fields["differing"] = result.differing;
  fields["kernel"] = result.kernel;
  fields["formats"] = result.formats;
  return fields;
}

}  // namespace

void bind_plugin(py::module_& module) {
  module.def("probe_backend", &probe_backend, py::arg("name"),
             "The keys are built, reason and devices, a list of {name, vendor, arch, memory_bytes, "
             "reason}.");
  module.def("plugin_abi", [] {
    return std::pair<uint32_t, uint32_t>{DFLASH_BACKEND_ABI_VERSION, DFLASH_HOST_ABI_VERSION};
  });
  py::class_<BackendDevice>(
      module, "BackendDevice",
      "An opened device of a backend. While a worker serves with it, only the worker may use it.")
      .def(py::init(&open_device), py::kw_only(), py::arg("backend"), py::arg("device") = 0,
           py::arg("simulate") = "", py::arg("num_threads") = 1, py::arg("seed") = 1,
           "ConfigError is for a device that does not exist, and UnsupportedError says why the "
           "backend or the device cannot be used.")
      .def_property_readonly(
          "label", [](const BackendDevice& self) { return self.backend->label(); },
          "For example \"cuda:0 (NVIDIA H200)\".")
      .def_property_readonly("arch",
                             [](const BackendDevice& self) { return self.backend->listing().arch; })
      .def("numerics_classes", &classes_of)
      .def(
          "free_bytes",
          [](const BackendDevice& self) { return unwrap(self.backend->free_bytes()); },
          "The bytes of the device's memory that are free now.")
      .def(
          "layer_bytes",
          [](const BackendDevice& self, const Fields& spec, uint32_t num_experts,
             const std::string& weight_dtype, const std::string& numerics) {
            return unwrap(
                self.backend->predicted_bytes(parse_ffn_spec(spec), num_experts,
                                              unwrap(compute::parse_resident_formats(weight_dtype)),
                                              unwrap(compute::parse_numerics(numerics))));
          },
          py::kw_only(), py::arg("spec"), py::arg("num_experts"), py::arg("weight_dtype"),
          py::arg("numerics") = compute::numerics_name(compute::kDefaultNumerics),
          "The bytes that such a layer will hold on the device.")
      .def("self_test", &self_test, py::arg("test_case"),
           "The keys are num_cases, elements, differing, kernel and formats.");
}

}  // namespace dflash::bindings

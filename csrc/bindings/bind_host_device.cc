// Binds the device on which a host's own tensors live, and pinned memory to stage them in.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/errors.h"
#include "plugin/loader.h"
#include "transport/shared/segment.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

// The device's address, the host's address, and the number of bytes.
using Piece = std::tuple<uintptr_t, uintptr_t, uint64_t>;

HostDeviceBox open_host_device(const std::string& backend, uint32_t device) {
  const dflash_host_table& table = *unwrap(plugin::load_host(backend, plugin_directory(backend)));
  Result<std::shared_ptr<plugin::HostDevice>> opened = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    opened = plugin::HostDevice::open(table, device);
  }
  return HostDeviceBox{unwrap(std::move(opened))};
}

std::vector<dflash_transfer> transfers_of(const std::vector<Piece>& pieces) {
  std::vector<dflash_transfer> transfers;
  for (const auto& [device, host, num_bytes] : pieces) {
    transfers.push_back(
        {reinterpret_cast<void*>(device), reinterpret_cast<void*>(host), num_bytes});
  }
  return transfers;
}

template <Status (plugin::HostDevice::*kCopy)(std::span<const dflash_transfer>)>
void copy(const HostDeviceBox& self, const std::vector<Piece>& pieces) {
  const std::vector<dflash_transfer> transfers = transfers_of(pieces);
  Status copied = ok();
  {
    py::gil_scoped_release unlocked;
    copied = ((*self.device).*kCopy)(transfers);
  }
  unwrap(std::move(copied));
}

// Returns why the device cannot use memory that is mapped as a host maps a worker's replies. The
// text is empty where it can.
std::string refuses_replies(const HostDeviceBox& self, bool is_open) {
  const transport::SlotGeometry geometry{1, 4096, 4096};
  const transport::Segment theirs =
      unwrap(transport::Segment::create(transport::Side::kWorker, geometry, 1, is_open));
  OwnedFd copy(::dup(theirs.fd()));
  const auto ours = std::make_shared<transport::Segment>(unwrap(
      transport::Segment::attach(std::move(copy), transport::Side::kWorker, geometry, 1, is_open)));
  const auto mapped = self.device->map_memory(ours->base(), ours->mapped_bytes(), !is_open, ours);
  self.device->keep_mapped({});
  return mapped.ok() ? std::string() : mapped.error().message;
}

}  // namespace

void bind_host_device(py::module_& module) {
  using Block = plugin::HostDevice::Block;
  py::class_<Block>(module, "StagingBlock",
                    "Memory of the host that a device copies from and to fastest. It goes back to "
                    "the pool of the device when the object dies.")
      .def_property_readonly("address", [](const Block& block) {
        return reinterpret_cast<uintptr_t>(block.memory());
      });
  py::class_<HostDeviceBox>(module, "HostDevice",
                            "The device that a host's own tensors live on. Any thread may call.")
      .def(py::init(&open_host_device), py::kw_only(), py::arg("backend"), py::arg("device") = 0,
           "ConfigError is for a device that does not exist; UnsupportedError says why it cannot "
           "be used.")
      .def_property_readonly(
          "name", [](const HostDeviceBox& self) { return self.device->name(); },
          "For example \"cuda 0 (NVIDIA H200)\".")
      .def_property_readonly(
          "dlpack_device",
          [](const HostDeviceBox& self) {
            return py::make_tuple(self.device->dlpack_type(), self.device->dlpack_id());
          },
          "DLPack's device type and number of its tensors. A simulated card has those of the "
          "processor, (1, 0).")
      .def_property_readonly(
          "stream", [](const HostDeviceBox& self) { return self.device->stream(); },
          "The stream of its queue for `__dlpack__(stream=...)`; 0 means that it has none.")
      .def("refuses_replies", &refuses_replies, py::kw_only(), py::arg("is_open"),
           "Says why it cannot use the memory of replies, and is empty where it can. It must not "
           "be called in a step.")
      .def(
          "staging",
          [](const HostDeviceBox& self, uint64_t num_bytes) {
            Result<std::unique_ptr<Block>> block = Error{ErrorCode::kClosed, ""};
            {
              py::gil_scoped_release unlocked;
              block = self.device->staging(num_bytes);
            }
            return unwrap(std::move(block));
          },
          py::arg("num_bytes"))
      .def("copy_in", &copy<&plugin::HostDevice::copy_in>, py::arg("pieces"),
           "This and `copy_out` take pieces of (device's address, host's address, bytes), and "
           "return when all is copied.")
      .def("copy_out", &copy<&plugin::HostDevice::copy_out>, py::arg("pieces"));
}

}  // namespace dflash::bindings

// The memory of a ping-pong between a device and a processor, and both ends (`bench.lab doorbell`).
// The words are the heads of two segments, which are made and mapped as in the shared transport, or
// lie in pinned memory.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/errors.h"
#include "measure/bell_device.h"
#include "plugin/abi_records.h"
#include "transport/ring/layout.h"
#include "transport/shared/segment.h"

namespace py = pybind11;

namespace dflash::measure {
namespace {

using bindings::raise;
using bindings::unwrap;
using transport::Segment;
using transport::Side;
using SharedDevice = std::shared_ptr<BellDevice>;

SharedDevice open_device(const std::string& backend, uint32_t device) {
  const std::string directory = bindings::plugin_directory(backend);
  Result<std::unique_ptr<BellDevice>> opened = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    opened = BellDevice::open(backend, device, directory);
  }
  return unwrap(std::move(opened));
}

int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

class BellMemory {
 public:
  // Makes both sides' segments in one process. A child made by fork has them too and can be the
  // processor's end.
  static std::unique_ptr<BellMemory> of_segments(bool is_open, uint64_t slot_bytes) {
    auto memory = std::make_unique<BellMemory>();
    const transport::SlotGeometry geometry{1, slot_bytes, slot_bytes};
    memory->host_.emplace(unwrap(Segment::create(Side::kHost, geometry, 1)));
    memory->worker_.emplace(unwrap(Segment::create(Side::kWorker, geometry, 1, is_open)));
    OwnedFd copy(::dup(memory->worker_->fd()));
    if (!copy.is_open())
      raise(Error{ErrorCode::kSystem,
                  std::string("cannot duplicate a descriptor: ") + std::strerror(errno)});
    memory->attached_ = std::make_shared<Segment>(
        unwrap(Segment::attach(std::move(copy), Side::kWorker, geometry, 1, is_open)));
    memory->ring_ = word(memory->host_->base(), transport::kHeadOffset);
    memory->answer_ = word(memory->worker_->base(), transport::kHeadOffset);
    return memory;
  }
  static std::unique_ptr<BellMemory> pinned(const SharedDevice& device) {
    auto memory = std::make_unique<BellMemory>();
    memory->pinned_ = unwrap(device->allocate_pinned(2 * transport::kLineBytes));
    memory->owner_ = device;
    std::memset(memory->pinned_, 0, 2 * transport::kLineBytes);
    memory->ring_ = memory->device_ring_ = word(memory->pinned_, 0);
    memory->answer_ = memory->device_answer_ = word(memory->pinned_, transport::kLineBytes);
    return memory;
  }
  BellMemory() = default;
  BellMemory(const BellMemory&) = delete;
  BellMemory& operator=(const BellMemory&) = delete;
  ~BellMemory() {
    if (owner_ != nullptr) owner_->release_pinned(pinned_);
  }

  // Maps as a device step maps its data paths: the host's own segment to write, the worker's to
  // read.
  uint64_t map(BellDevice& device) {
    if (!attached_) return 0;
    py::gil_scoped_release unlocked;
    device_ring_ =
        word(mapped(device.map_memory(host_->base(), host_->mapped_bytes(), false), "requests"),
             transport::kHeadOffset);
    device_answer_ = word(mapped(device.map_memory(attached_->base(), attached_->mapped_bytes(),
                                                   !attached_->is_writable()),
                                 "replies"),
                          transport::kHeadOffset);
    return host_->mapped_bytes() + attached_->mapped_bytes();
  }
  void unmap(BellDevice& device) {
    if (!attached_) return;
    py::gil_scoped_release unlocked;
    device.unmap_memory(host_->base());
    device.unmap_memory(attached_->base());
    device_ring_ = device_answer_ = nullptr;
  }

  std::vector<int64_t> answer(uint32_t first, uint32_t rounds, double timeout_s) {
    py::gil_scoped_release unlocked;
    return answer_bells({ring_, answer_, first, rounds, nanoseconds(timeout_s)});
  }

  // Returns the number of rounds that were answered.
  uint32_t ring(BellDevice& device, uint32_t first, uint32_t rounds, double budget_s) {
    auto bells = plugin::new_record<dflash_bell_rounds>();
    bells.ring = device_ring_;
    bells.answer = device_answer_;
    bells.first = first;
    bells.num_rounds = rounds;
    bells.budget_ns = nanoseconds(budget_s);
    Status rung = [&] {
      py::gil_scoped_release unlocked;
      return device.ring(bells);
    }();
    unwrap(std::move(rung));
    return bells.num_done;
  }

 private:
  static uint32_t* word(std::byte* base, uint64_t offset) {
    return reinterpret_cast<uint32_t*>(base + offset);
  }
  static std::byte* mapped(Result<std::byte*> result, const char* what) {
    if (result.ok()) return result.value();
    py::gil_scoped_acquire locked;
    raise(std::move(result).error().with(what));
  }

  std::optional<Segment> host_, worker_;
  std::shared_ptr<Segment> attached_;  // the worker's, as a host maps it; null for pinned memory
  SharedDevice owner_;                 // the device to which the pinned memory belongs
  std::byte* pinned_ = nullptr;
  uint32_t *ring_ = nullptr, *answer_ = nullptr;  // the processor's addresses, both writable
  uint32_t *device_ring_ = nullptr, *device_answer_ = nullptr;
};

}  // namespace

void bind_bells(py::module_& module) {
  py::class_<BellDevice, SharedDevice>(
      module, "BellDevice",
      "A card, or a simulated one, with the kernel that rings. UnsupportedError says what to do "
      "where its plug-in is missing or cannot be used, and ConfigError is for a device that does "
      "not exist.")
      .def(py::init(&open_device), py::kw_only(), py::arg("backend"), py::arg("device") = 0)
      .def_property_readonly("name", &BellDevice::name);
  py::class_<BellMemory>(module, "BellMemory",
                         "Two words for a ping-pong of a device and a processor (`bench.lab "
                         "doorbell`), with both ends of it.")
      .def_static("of_segments", &BellMemory::of_segments, py::kw_only(), py::arg("is_open"),
                  py::arg("slot_bytes"),
                  "The words are the heads of two segments. Open segments have no seal against "
                  "writing (segment.h).")
      .def_static("pinned", &BellMemory::pinned, py::arg("device"))
      .def("map", &BellMemory::map, py::arg("device"),
           "Returns the bytes that were mapped, 0 for pinned memory. UnsupportedError has the "
           "driver's words.")
      .def("unmap", &BellMemory::unmap, py::arg("device"))
      .def("answer", &BellMemory::answer, py::kw_only(), py::arg("first"), py::arg("rounds"),
           py::arg("timeout_s"),
           "Returns when each round was seen, in nanoseconds of the monotonic clock. There are "
           "fewer than `rounds` where the time was over.")
      .def("ring", &BellMemory::ring, py::arg("device"), py::kw_only(), py::arg("first"),
           py::arg("rounds"), py::arg("budget_s"),
           "Returns the number of rounds that were answered. UnsupportedError, WorkerTimeout.");
}

}  // namespace dflash::measure

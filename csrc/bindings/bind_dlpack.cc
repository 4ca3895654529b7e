// A borrowed view of any tensor that speaks DLPack (https://dmlc.github.io/dlpack), with legacy or
// versioned capsules. The structs restate the public ABI of DLPack 1.0, so that no header of that
// project is needed.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <utility>

#include "bindings/errors.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

struct DlDevice {
  int32_t device_type;
  int32_t device_id;
};
struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* manager_context;
  void (*deleter)(DlManagedTensor*);
};
struct DlManagedTensorVersioned {
  uint32_t major, minor;
  void* manager_context;
  void (*deleter)(DlManagedTensorVersioned*);
  uint64_t flags;
  DlTensor tensor;
};
constexpr int32_t kCpuDevice = 1;
constexpr int32_t kPinnedHostDevice = 3;

const char* type_name(DlDataType type) {
  if (type.lanes != 1) return nullptr;
  if (type.code == 2 && type.bits == 32) return "f32";
  if (type.code == 2 && type.bits == 16) return "f16";
  if (type.code == 4 && type.bits == 16) return "bf16";
  if (type.code == 0 && type.bits == 32) return "i32";
  if (type.code == 0 && type.bits == 64) return "i64";
  return nullptr;
}

class DlpackView {
 public:
  using Sizes = py::typing::Tuple<py::int_, py::ellipsis>;

  // Takes over the capsule's tensor: it renames the capsule to "used_...", as the protocol asks,
  // and frees the tensor when this view dies. `device` is the DLPack type and number on which the
  // tensor must be.
  DlpackView(const py::object& object, std::pair<int32_t, int32_t> device) : device_(device) {
    PyObject* capsule = object.ptr();
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
      versioned_ = static_cast<DlManagedTensorVersioned*>(
          PyCapsule_GetPointer(capsule, "dltensor_versioned"));
      if (versioned_->major != 1) {
        versioned_ = nullptr;
        raise(Error{ErrorCode::kUnsupported, "DLPack major version is not 1"});
      }
      inspect(versioned_->tensor);
      PyCapsule_SetName(capsule, "used_dltensor_versioned");
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
      legacy_ = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
      inspect(legacy_->tensor);
      PyCapsule_SetName(capsule, "used_dltensor");
    } else {
      raise(Error{ErrorCode::kInvalidArgument,
                  "expected an unused DLPack capsule, as __dlpack__() returns it"});
    }
    owned_ = true;
  }
  DlpackView(const DlpackView&) = delete;
  DlpackView& operator=(const DlpackView&) = delete;
  ~DlpackView() {
    if (!owned_) return;
    if (versioned_ != nullptr && versioned_->deleter != nullptr) versioned_->deleter(versioned_);
    if (legacy_ != nullptr && legacy_->deleter != nullptr) legacy_->deleter(legacy_);
  }

  uintptr_t address() const { return address_; }
  Sizes shape() const { return shape_; }
  Sizes strides() const { return strides_; }
  std::string dtype() const { return dtype_; }

 private:
  void inspect(const DlTensor& tensor) {
    const bool is_in_host_memory =
        tensor.device.device_type == kCpuDevice || tensor.device.device_type == kPinnedHostDevice;
    const bool is_expected = device_.first == kCpuDevice
                                 ? is_in_host_memory
                                 : tensor.device.device_type == device_.first &&
                                       tensor.device.device_id == device_.second;
    if (!is_expected) {
      raise(Error{ErrorCode::kUnsupported,
                  "the tensor is on DLPack device type " +
                      std::to_string(tensor.device.device_type) + ", number " +
                      std::to_string(tensor.device.device_id) + "; expected is type " +
                      std::to_string(device_.first) + ", number " + std::to_string(device_.second) +
                      (device_.first == kCpuDevice ? " (host memory)" : "")});
    }
    const char* name = type_name(tensor.dtype);
    if (name == nullptr) {
      raise(Error{ErrorCode::kInvalidArgument, "the tensor's element type (DLPack code " +
                                                   std::to_string(tensor.dtype.code) + ", " +
                                                   std::to_string(tensor.dtype.bits) +
                                                   " bits) is none of f32, f16, bf16, i32, i64"});
    }
    dtype_ = name;
    address_ = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
    const size_t ndim = tensor.ndim > 0 ? static_cast<size_t>(tensor.ndim) : 0;
    Sizes shape(ndim), strides(ndim);
    int64_t dense = 1;
    for (size_t i = ndim; i-- > 0;) {
      shape[i] = tensor.shape[i];
      strides[i] = tensor.strides == nullptr ? dense : tensor.strides[i];
      dense *= tensor.shape[i];
    }
    shape_ = shape;
    strides_ = strides;
  }

  DlManagedTensor* legacy_ = nullptr;
  DlManagedTensorVersioned* versioned_ = nullptr;
  bool owned_ = false;
  const std::pair<int32_t, int32_t> device_;
  uintptr_t address_ = 0;
  Sizes shape_, strides_;
  std::string dtype_;
};

}  // namespace

void bind_dlpack(py::module_& module) {
  py::class_<DlpackView>(
      module, "DlpackView",
      "A tensor borrowed from any object with `__dlpack__`, for as long as the view lives. It "
      "raises UnsupportedError for another device and ConfigError for a bad dtype.")
      .def(py::init<const py::object&, std::pair<int32_t, int32_t>>(), py::arg("capsule"),
           py::arg("device") = std::pair<int32_t, int32_t>(kCpuDevice, 0),
           "`device` is DLPack's type and number of the device where the tensor must be.")
      .def_property_readonly("address", &DlpackView::address)
      .def_property_readonly("shape", &DlpackView::shape)
      .def_property_readonly("strides", &DlpackView::strides, "They count elements.")
      .def_property_readonly("dtype", &DlpackView::dtype, "It is f32, f16, bf16, i32 or i64.");
}

}  // namespace dflash::bindings

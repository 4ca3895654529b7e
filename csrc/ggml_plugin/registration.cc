// Fills ggml's tables for registration and devices.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/registration.h"

#include "ggml_plugin/weight_buffer.h"

namespace dflash::ggml_plugin {
namespace {

constexpr char kWeightDeviceName[] = "DFLASH_MOE_W";
constexpr char kDeviceName[] = "DFLASH_MOE";
constexpr char kWeightDescription[] = "weights of experts that dflash-moe workers hold";
constexpr char kDescription[] = "experts that dflash-moe workers compute";

Registration& of(ggml_backend_dev_t device) { return *static_cast<Registration*>(device->context); }
Registration& of(ggml_backend_reg_t reg) { return *static_cast<Registration*>(reg->context); }
bool holds_weights(ggml_backend_dev_t device) { return device == of(device).weight_device(); }

const char* reg_name(ggml_backend_reg_t) { return "DFLASH_MOE"; }
size_t device_count(ggml_backend_reg_t) { return 2; }
ggml_backend_dev_t device_at(ggml_backend_reg_t reg, size_t index) {
  return index == 0 ? of(reg).weight_device() : index == 1 ? of(reg).device() : nullptr;
}

const char* get_name(ggml_backend_dev_t device) {
  return holds_weights(device) ? kWeightDeviceName : kDeviceName;
}
const char* get_description(ggml_backend_dev_t device) {
  return holds_weights(device) ? kWeightDescription : kDescription;
}
// No memory to report keeps llama.cpp's -fit from planning with these devices.
void get_memory(ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; }
enum ggml_backend_dev_type get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

// Some releases say of a device whether files may be mapped for it.
template <class Caps>
void allow_mapping(Caps& caps) {
  if constexpr (requires { caps.mmap_support = true; }) caps.mmap_support = true;
}

void get_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = get_name(device);
  props->description = get_description(device);
  props->type = get_type(device);
  // Without buffer_from_host_ptr and async, llama.cpp writes each tensor whole and at once, from
  // its mapping of the file or from a temporary copy.
  allow_mapping(props->caps);
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char*) {
  Registration& registration = of(device);
  return holds_weights(device) ? make_weight_backend(registration) : make_backend(registration);
}

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t device) {
  return holds_weights(device) ? of(device).weight_type() : of(device).host_type();
}

bool supports_op(ggml_backend_dev_t device, const ggml_tensor* op) {
  Registration& registration = of(device);
  if (holds_weights(device))
    return takes_weight(registration.plan(), registration.weight_type(), op);
  return hangs_on_weights(registration.scope(), op);
}

// A scheduler insists that a backend supports its own default type.
bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
  if (type == of(device).weight_type()) return true;
  return !holds_weights(device) && is_host_memory(type);
}

// offload_op stays null: with it llama.cpp would hand over operations whose weights lie elsewhere.
void fill_device(ggml_backend_device* device, ggml_backend_reg_t reg, Registration* registration) {
  *device = {};
  device->iface.get_name = get_name;
  device->iface.get_description = get_description;
  device->iface.get_memory = get_memory;
  device->iface.get_type = get_type;
  device->iface.get_props = get_props;
  device->iface.init_backend = init_backend;
  device->iface.get_buffer_type = get_buffer_type;
  device->iface.supports_op = supports_op;
  device->iface.supports_buft = supports_buft;
  device->reg = reg;
  device->context = registration;
}

}  // namespace

Registration::Registration(Plan plan) : plan_(std::move(plan)), scope_{&plan_, &weight_type_} {
  reg_ = {};
  reg_.api_version = GGML_BACKEND_API_VERSION;
  reg_.iface.get_name = reg_name;
  reg_.iface.get_device_count = device_count;
  reg_.iface.get_device = device_at;
  reg_.context = this;
  fill_device(&weight_device_, &reg_, this);
  fill_device(&device_, &reg_, this);
  fill_weight_buffer_type(&weight_type_, &weight_device_, &plan_);
  fill_host_buffer_type(&host_type_, &device_);
}

}  // namespace dflash::ggml_plugin

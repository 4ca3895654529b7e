// A buffer type over the C library's memory.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/registration.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace dflash::ggml_plugin {
namespace {

constexpr char kTypeName[] = "DFLASH_MOE_Host";
// A cache line; what ggml's own processor backend asks for.
constexpr size_t kAlignment = 64;

char* data_of(const ggml_tensor* tensor) { return static_cast<char*>(tensor->data); }

void free_buffer(ggml_backend_buffer_t buffer) { std::free(buffer->context); }
void* get_base(ggml_backend_buffer_t buffer) { return buffer->context; }
void memset_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, uint8_t value, size_t offset,
                   size_t size) {
  std::memset(data_of(tensor) + offset, value, size);
}
void set_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
  std::memcpy(data_of(tensor) + offset, data, size);
}
void get_tensor(ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, size_t offset,
                size_t size) {
  std::memcpy(data, data_of(tensor) + offset, size);
}
// ggml tries plain memory on either side first; what is left comes from devices that copy out
// themselves when this says no.
bool cpy_tensor(ggml_backend_buffer_t, const ggml_tensor*, ggml_tensor*) { return false; }
void clear(ggml_backend_buffer_t buffer, uint8_t value) {
  std::memset(buffer->context, value, buffer->size);
}

const char* get_name(ggml_backend_buffer_type_t) { return kTypeName; }
size_t get_alignment(ggml_backend_buffer_type_t) { return kAlignment; }
bool is_host(ggml_backend_buffer_type_t) { return true; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t num_bytes) {
  const size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = rounded < num_bytes ? nullptr : std::aligned_alloc(kAlignment, rounded);
  auto* buffer = memory ? new (std::nothrow) ggml_backend_buffer{} : nullptr;
  if (!buffer) {
    std::free(memory);
    return nullptr;
  }
  buffer->iface.free_buffer = free_buffer;
  buffer->iface.get_base = get_base;
  buffer->iface.memset_tensor = memset_tensor;
  buffer->iface.set_tensor = set_tensor;
  buffer->iface.get_tensor = get_tensor;
  buffer->iface.cpy_tensor = cpy_tensor;
  buffer->iface.clear = clear;
  buffer->buft = type;
  buffer->context = memory;
  buffer->size = num_bytes;
  buffer->usage = GGML_BACKEND_BUFFER_USAGE_ANY;
  return buffer;
}

}  // namespace

void fill_host_buffer_type(ggml_backend_buffer_type* type, ggml_backend_dev_t device) {
  *type = {};
  type->iface.get_name = get_name;
  type->iface.alloc_buffer = alloc_buffer;
  type->iface.get_alignment = get_alignment;
  type->iface.is_host = is_host;
  type->device = device;
}

bool is_host_memory(ggml_backend_buffer_type_t type) {
  return type->iface.is_host && type->iface.is_host(type);
}

}  // namespace dflash::ggml_plugin

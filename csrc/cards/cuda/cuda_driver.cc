// SPDX-License-Identifier: Apache-2.0
#include "cards/cuda/cuda_driver.h"

#include <string.h>

#include <type_traits>
#include <utility>

#include "cards/cuda/cuda_functions.h"
#include "cards/module/driver_library.h"

namespace dflash::compute::gpu {
namespace {

using namespace cuda;

Pointer address(const void* memory) { return reinterpret_cast<Pointer>(memory); }

class CudaDriver final : public DriverApi {
 public:
  explicit CudaDriver(const CudaImage& image) : image_(image) {}
  Status open(const DriverLibrary& library);

  Result<std::vector<DriverDevice>> list() override;
  // the driver chooses inside
  std::vector<const void*> images(const DeviceFacts&) const override { return {image_.fatbin}; }

  int use(uint32_t device) override {
    if (context_ == nullptr) {
      if (const int status = retain_(&context_, static_cast<int>(device)); status != 0)
        return status;
    }
    return set_current_(context_);
  }
  void drop(uint32_t device) override {
    if (context_ != nullptr) release_context_(static_cast<int>(device));
    context_ = nullptr;
  }
  int current(void** saved) override { return get_current_(saved); }
  int restore(void* saved) override { return set_current_(saved); }
  int memory(size_t* free_bytes, size_t* all_bytes) override {
    return memory_(free_bytes, all_bytes);
  }
  int allocate(void** memory, size_t num_bytes) override {
    Pointer pointer = 0;
    const int status = allocate_(&pointer, num_bytes);
    *memory = reinterpret_cast<void*>(pointer);
    return status;
  }
  int release(void* memory) override { return release_(address(memory)); }
  int allocate_host(void** memory, size_t num_bytes) override {
    return allocate_host_(memory, num_bytes, 0);
  }
  int release_host(void* memory) override { return release_host_(memory); }
  int map_host(void* memory, size_t num_bytes, bool is_read_only) override {
    return register_(
        memory, num_bytes,
        kRegisterPortable | kRegisterDeviceMap | (is_read_only ? kRegisterReadOnly : 0u));
  }
  int unmap_host(void* memory) override { return unregister_(memory); }
  int device_address(void** device, void* memory) override {
    Pointer pointer = 0;
    const int status = device_pointer_(&pointer, memory, 0);
    *device = reinterpret_cast<void*>(pointer);
    return status;
  }
  int create_queue(void** queue) override { return create_stream_(queue, kNonBlockingStream); }
  int destroy_queue(void* queue) override { return destroy_stream_(queue); }
  int query(void* queue) override { return query_(queue); }
  int copy_in(void* device, const void* host, size_t num_bytes, void* queue) override {
    return copy_in_(address(device), host, num_bytes, queue);
  }
  int copy_out(void* host, const void* device, size_t num_bytes, void* queue) override {
    return copy_out_(host, address(device), num_bytes, queue);
  }
  int fill(void* device, uint8_t value, size_t num_bytes, void* queue) override {
    return fill_(address(device), value, num_bytes, queue);
  }
  int create_event(void** event) override { return create_event_(event, 0); }
  int destroy_event(void* event) override { return destroy_event_(event); }
  int record_event(void* event, void* queue) override { return record_(event, queue); }
  int elapsed(float* milliseconds, void* begin, void* end) override {
    return elapsed_(milliseconds, begin, end);
  }
  int load_module(void** module, const void* image) override { return load_(module, image); }
  int unload_module(void* module) override { return unload_(module); }
  int find_function(void** function, void* module, const char* name) override {
    return function_(function, module, name);
  }
  int allow_dynamic(void* function, uint32_t num_bytes) override {
    return set_attribute_(function, kFunctionDynamicBytes, static_cast<int>(num_bytes));
  }
  int launch(void* function, uint32_t grid_x, uint32_t grid_y, uint32_t threads,
             uint32_t dynamic_bytes, void* queue, void** arguments) override {
    return launch_(function, grid_x, grid_y, 1, threads, 1, 1, dynamic_bytes, queue, arguments,
                   nullptr);
  }
  std::string text(int status) override {
    const char* found = nullptr;
    if (text_(status, &found) != 0 || found == nullptr)
      return "CUDA error " + std::to_string(status);
    return std::string(found) + " (CUDA error " + std::to_string(status) + ")";
  }

 private:
  DriverDevice describe(int device);

  const CudaImage image_;
  void* context_ = nullptr;
#define DFLASH_MEMBER(member, name, type) std::add_pointer_t<type> member = nullptr;
  DFLASH_CUDA_FUNCTIONS(DFLASH_MEMBER)
#undef DFLASH_MEMBER
};

Status CudaDriver::open(const DriverLibrary& library) {
#define DFLASH_FIND(member, name, type) DFLASH_TRY(library.find(#name, member));
  DFLASH_CUDA_FUNCTIONS(DFLASH_FIND)
#undef DFLASH_FIND
  return ok();
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Result<std::vector<DriverDevice>> CudaDriver::list() {
  int version = 0;
  const int asked = version_(&version);
  const int least_version = 1000 * image_.toolkit_major;  // minor versions are compatible
  if (asked == 0 && version < least_version) {
    return Error{ErrorCode::kUnsupported, "the driver is for CUDA " + version_text(version) +
                                              ", this build needs " + version_text(least_version) +
                                              " or later; update the driver"};
  }
  const int started = init_(0);
  if (started == kNoDevice) return std::vector<DriverDevice>{};
  if (started == kDriverMismatch) {
    return Error{ErrorCode::kUnsupported,
                 "the driver in the kernel and libcuda are of different versions; restart after an "
                 "update of the driver"};
  }
  if (started != 0)
    return Error{ErrorCode::kUnsupported, "the driver does not start: " + text(started)};
  int count = 0;
  if (const int status = count_(&count); status != 0 && status != kNoDevice) {
    return Error{ErrorCode::kUnsupported, "the driver does not list its devices: " + text(status)};
  }
  std::vector<DriverDevice> devices;
  for (int index = 0; index < count; ++index) devices.push_back(describe(index));
  return devices;
}

DriverDevice CudaDriver::describe(int index) {
  DriverDevice found;
  found.facts.backend = "cuda";
  found.facts.index = static_cast<uint32_t>(index);
  int device = 0, major = 0, minor = 0, units = 1, warp = 32;
  char name[256] = "unnamed";
  size_t total = 0;
  int status = device_(&device, index);
  if (status == 0) status = name_(name, sizeof name, device);
  if (status == 0) status = total_(&total, device);
  if (status == 0) status = attribute_(&major, kAttributeMajor, device);
  if (status == 0) status = attribute_(&minor, kAttributeMinor, device);
  if (status == 0) status = attribute_(&units, kAttributeMultiprocessors, device);
  if (status == 0) status = attribute_(&warp, kAttributeWarpSize, device);
  found.facts.name = std::string(name, ::strnlen(name, sizeof name));
  found.facts.architecture = "sm_" + std::to_string(major) + std::to_string(minor);
  found.facts.has_warpgroups = image_.has_sm90a && major == 9 && minor == 0;
  found.facts.memory_bytes = total;
  found.facts.num_units = static_cast<uint32_t>(units);
  found.facts.wave_width = static_cast<uint32_t>(warp);
  if (status != 0) {
    found.reason = "the driver does not describe it: " + text(status);
  } else if (major * 10 + minor < image_.least_arch) {
    found.reason = "its architecture " + found.facts.architecture + " is below sm_" +
                   std::to_string(image_.least_arch) +
                   ", the oldest that this build has kernels for";
  }
  return found;
}

}  // namespace

Result<std::unique_ptr<DriverApi>> open_cuda_driver(const CudaImage& image,
                                                    const std::string& library) {
  auto opened = DriverLibrary::open({library});
  if (!opened.ok()) return std::move(opened).error();
  auto driver = std::make_unique<CudaDriver>(image);
  DFLASH_TRY(driver->open(opened.value()));
  return std::unique_ptr<DriverApi>(std::move(driver));
}

}  // namespace dflash::compute::gpu

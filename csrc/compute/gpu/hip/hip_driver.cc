// SPDX-License-Identifier: Apache-2.0
#include "compute/gpu/hip/hip_driver.h"

#include <string.h>

#include <utility>

#include "compute/gpu/module/driver_library.h"

namespace dflash::compute::gpu {
namespace {

constexpr int kNoDevice = 100, kInvalidDevice = 101;  // hipErrorNoDevice, hipErrorInvalidDevice
constexpr int kInsufficientDriver = 35;   // hipErrorInsufficientDriver
constexpr unsigned kNonBlockingStream = 1;

class HipDriver final : public DriverApi {
 public:
  HipDriver(std::vector<CodeObject> objects, std::string topology) : objects_(std::move(objects)), topology_(std::move(topology)) {}
  Status open(const DriverLibrary& library);

  Result<std::vector<DriverDevice>> list() override;
  std::vector<const void*> images(const DeviceFacts& facts) const override;

  int use(uint32_t device) override { return set_device_(static_cast<int>(device)); }
  void drop(uint32_t) override {}  // the runtime keeps its context for the process
  int current(void** saved) override {
    int device = 0;
    const int status = get_device_(&device);
    *saved = reinterpret_cast<void*>(static_cast<intptr_t>(device));
    return status;
  }
  int restore(void* saved) override { return set_device_(static_cast<int>(reinterpret_cast<intptr_t>(saved))); }
  int memory(size_t* free_bytes, size_t* all_bytes) override { return memory_(free_bytes, all_bytes); }
  int allocate(void** memory, size_t num_bytes) override { return allocate_(memory, num_bytes); }
  int release(void* memory) override { return release_(memory); }
  int allocate_host(void** memory, size_t num_bytes) override { return allocate_host_(memory, num_bytes, 0); }
  int release_host(void* memory) override { return release_host_(memory); }
  int create_queue(void** queue) override { return create_stream_(queue, kNonBlockingStream); }
  int destroy_queue(void* queue) override { return destroy_stream_(queue); }
  int query(void* queue) override { return query_(queue); }
  int copy_in(void* device, const void* host, size_t num_bytes, void* queue) override {
    return copy_in_(device, const_cast<void*>(host), num_bytes, queue);
  }
  int copy_out(void* host, const void* device, size_t num_bytes, void* queue) override {
    return copy_out_(host, const_cast<void*>(device), num_bytes, queue);
  }
  int fill(void* device, uint8_t value, size_t num_bytes, void* queue) override { return fill_(device, value, num_bytes, queue); }
  int create_event(void** event) override { return create_event_(event, 0); }
  int destroy_event(void* event) override { return destroy_event_(event); }
  int record_event(void* event, void* queue) override { return record_(event, queue); }
  int elapsed(float* milliseconds, void* begin, void* end) override { return elapsed_(milliseconds, begin, end); }
  int load_module(void** module, const void* image) override { return load_(module, image); }
  int unload_module(void* module) override { return unload_(module); }
  int find_function(void** function, void* module, const char* name) override { return function_(function, module, name); }
  int launch(void* function, uint32_t grid_x, uint32_t grid_y, uint32_t threads, void* queue, void** arguments) override {
    return launch_(function, grid_x, grid_y, 1, threads, 1, 1, 0, queue, arguments, nullptr);
  }
  std::string text(int status) override {
    const char* found = text_(status);
    return std::string(found == nullptr ? "unknown" : found) + " (HIP error " + std::to_string(status) + ")";
  }

 private:
  DriverDevice describe(int index, const std::vector<HipNode>& nodes);
  std::string architectures() const;

  std::vector<CodeObject> objects_;
  std::string topology_;
  int (*init_)(unsigned) = nullptr;
  int (*count_)(int*) = nullptr;
  int (*device_)(int*, int) = nullptr;
  int (*name_)(char*, int, int) = nullptr;
  int (*total_)(size_t*, int) = nullptr;
  int (*set_device_)(int) = nullptr;
  int (*get_device_)(int*) = nullptr;
  int (*memory_)(size_t*, size_t*) = nullptr;
  int (*allocate_)(void**, size_t) = nullptr;
  int (*release_)(void*) = nullptr;
  int (*allocate_host_)(void**, size_t, unsigned) = nullptr;
  int (*release_host_)(void*) = nullptr;
  int (*create_stream_)(void**, unsigned) = nullptr;
  int (*destroy_stream_)(void*) = nullptr;
  int (*query_)(void*) = nullptr;
  int (*copy_in_)(void*, void*, size_t, void*) = nullptr;
  int (*copy_out_)(void*, void*, size_t, void*) = nullptr;
  int (*fill_)(void*, unsigned char, size_t, void*) = nullptr;
  int (*create_event_)(void**, unsigned) = nullptr;
  int (*destroy_event_)(void*) = nullptr;
  int (*record_)(void*, void*) = nullptr;
  int (*elapsed_)(float*, void*, void*) = nullptr;
  int (*load_)(void**, const void*) = nullptr;
  int (*unload_)(void*) = nullptr;
  int (*function_)(void**, void*, const char*) = nullptr;
  int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) = nullptr;
  const char* (*text_)(int) = nullptr;
};

Status HipDriver::open(const DriverLibrary& library) {
  DFLASH_TRY(library.find("hipInit", init_));
  DFLASH_TRY(library.find("hipGetDeviceCount", count_));
  DFLASH_TRY(library.find("hipDeviceGet", device_));
  DFLASH_TRY(library.find("hipDeviceGetName", name_));
  DFLASH_TRY(library.find("hipDeviceTotalMem", total_));
  DFLASH_TRY(library.find("hipSetDevice", set_device_));
  DFLASH_TRY(library.find("hipGetDevice", get_device_));
  DFLASH_TRY(library.find("hipMemGetInfo", memory_));
  DFLASH_TRY(library.find("hipMalloc", allocate_));
  DFLASH_TRY(library.find("hipFree", release_));
  DFLASH_TRY(library.find("hipHostMalloc", allocate_host_));
  DFLASH_TRY(library.find("hipHostFree", release_host_));
  DFLASH_TRY(library.find("hipStreamCreateWithFlags", create_stream_));
  DFLASH_TRY(library.find("hipStreamDestroy", destroy_stream_));
  DFLASH_TRY(library.find("hipStreamQuery", query_));
  DFLASH_TRY(library.find("hipMemcpyHtoDAsync", copy_in_));
  DFLASH_TRY(library.find("hipMemcpyDtoHAsync", copy_out_));
  DFLASH_TRY(library.find("hipMemsetD8Async", fill_));
  DFLASH_TRY(library.find("hipEventCreateWithFlags", create_event_));
  DFLASH_TRY(library.find("hipEventDestroy", destroy_event_));
  DFLASH_TRY(library.find("hipEventRecord", record_));
  DFLASH_TRY(library.find("hipEventElapsedTime", elapsed_));
  DFLASH_TRY(library.find("hipModuleLoadData", load_));
  DFLASH_TRY(library.find("hipModuleUnload", unload_));
  DFLASH_TRY(library.find("hipModuleGetFunction", function_));
  DFLASH_TRY(library.find("hipModuleLaunchKernel", launch_));
  return library.find("hipGetErrorString", text_);
}

Result<std::vector<DriverDevice>> HipDriver::list() {
  const int started = init_(0);
  if (started == kNoDevice || started == kInvalidDevice) return std::vector<DriverDevice>{};
  if (started == kInsufficientDriver) {
    return Error{ErrorCode::kUnsupported, "the kernel's amdgpu driver is older than the HIP runtime; update it"};
  }
  if (started != 0) return Error{ErrorCode::kUnsupported, "the HIP runtime does not start: " + text(started)};
  int count = 0;
  if (const int status = count_(&count); status != 0 && status != kNoDevice) {
    return Error{ErrorCode::kUnsupported, "the HIP runtime does not list its devices: " + text(status)};
  }
  const std::vector<HipNode> nodes = read_hip_nodes(topology_);
  std::vector<DriverDevice> devices;
  for (int index = 0; index < count; ++index) devices.push_back(describe(index, nodes));
  return devices;
}

std::string HipDriver::architectures() const {
  std::string names;
  for (const CodeObject& object : objects_) names += (names.empty() ? "" : ", ") + std::string(object.architecture);
  return names;
}

// The architecture is known where the runtime sees as many devices as the kernel; where some are hidden, loading tells.
DriverDevice HipDriver::describe(int index, const std::vector<HipNode>& nodes) {
  DriverDevice found;
  found.facts.backend = "hip";
  found.facts.index = static_cast<uint32_t>(index);
  int device = 0, count = 0;
  char name[256] = "unnamed";
  size_t total = 0;
  int status = device_(&device, index);
  if (status == 0) status = name_(name, sizeof name, device);
  if (status == 0) status = total_(&total, device);
  if (status == 0) status = count_(&count);
  found.facts.name = std::string(name, ::strnlen(name, sizeof name));
  found.facts.memory_bytes = total;
  found.facts.wave_width = 64;
  if (status != 0) {
    found.reason = "the HIP runtime does not describe it: " + text(status);
    return found;
  }
  if (nodes.size() != static_cast<size_t>(count)) return found;
  const HipNode& node = nodes[static_cast<size_t>(index)];
  found.facts.architecture = node.architecture;
  found.facts.num_units = node.num_units;
  found.facts.wave_width = node.wave_width;
  if (images(found.facts).empty()) {
    found.reason = "its architecture " + node.architecture + " is none of those that this build has kernels for: " + architectures();
  }
  return found;
}

std::vector<const void*> HipDriver::images(const DeviceFacts& facts) const {
  std::vector<const void*> fitting;
  for (const CodeObject& object : objects_) {
    if (facts.architecture.empty() || facts.architecture == object.architecture) fitting.push_back(object.image);
  }
  return fitting;
}

}  // namespace

Result<std::unique_ptr<DriverApi>> open_hip_driver(std::vector<CodeObject> objects, const std::vector<std::string>& libraries,
                                                   const std::string& topology) {
  auto opened = DriverLibrary::open(libraries);
  if (!opened.ok()) return std::move(opened).error();
  auto driver = std::make_unique<HipDriver>(std::move(objects), topology);
  DFLASH_TRY(driver->open(opened.value()));
  return std::unique_ptr<DriverApi>(std::move(driver));
}

}  // namespace dflash::compute::gpu

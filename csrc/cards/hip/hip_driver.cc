// SPDX-License-Identifier: Apache-2.0
#include "cards/hip/hip_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "cards/hip/hip_functions.h"
#include "cards/module/driver_library.h"

namespace dflash::compute::gpu {
namespace {

using namespace hip;

// What the runtime takes the card for where its owner has told it so, for a card that runs the
// kernels of a sister.
std::string overridden_architecture(const std::string& architecture) {
  const char* told = ::getenv("HSA_OVERRIDE_GFX_VERSION");  // "10.3.0"
  unsigned major = 0, minor = 0, step = 0;
  if (told == nullptr || ::sscanf(told, "%2u.%2u.%2u", &major, &minor, &step) != 3)
    return architecture;
  return architecture_name(uint64_t{major} * 10000 + minor * 100 + step);
}

class HipDriver final : public DriverApi {
 public:
  HipDriver(std::vector<CodeObject> objects, std::string topology)
      : objects_(std::move(objects)), topology_(std::move(topology)) {}
  Status open(const DriverLibrary& library);

  Result<std::vector<DriverDevice>> list() override;
  std::vector<const void*> images(const DeviceFacts& facts) const override;

  int use(uint32_t device) override { return told(set_device_(static_cast<int>(device))); }
  void drop(uint32_t) override {}  // the runtime keeps its context for the process
  int current(void** saved) override {
    int device = 0;
    const int status = get_device_(&device);
    *saved = reinterpret_cast<void*>(static_cast<intptr_t>(device));
    return told(status);
  }
  int restore(void* saved) override {
    return told(set_device_(static_cast<int>(reinterpret_cast<intptr_t>(saved))));
  }
  int memory(size_t* free_bytes, size_t* all_bytes) override {
    return told(memory_(free_bytes, all_bytes));
  }
  int allocate(void** memory, size_t num_bytes) override {
    return told(allocate_(memory, num_bytes));
  }
  int release(void* memory) override { return told(release_(memory)); }
  int allocate_host(void** memory, size_t num_bytes) override {
    return told(allocate_host_(memory, num_bytes, 0));
  }
  int release_host(void* memory) override { return told(release_host_(memory)); }
  int map_host(void* memory, size_t num_bytes, bool is_read_only) override {
    return told(
        register_(memory, num_bytes,
                  kRegisterPortable | kRegisterMapped | (is_read_only ? kRegisterReadOnly : 0u)));
  }
  int unmap_host(void* memory) override { return told(unregister_(memory)); }
  int device_address(void** device, void* memory) override {
    return told(device_pointer_(device, memory, 0));
  }
  int create_queue(void** queue) override {
    return told(create_stream_(queue, kNonBlockingStream));
  }
  int destroy_queue(void* queue) override { return told(destroy_stream_(queue)); }
  int query(void* queue) override { return told(query_(queue)); }
  int copy_in(void* device, const void* host, size_t num_bytes, void* queue) override {
    return told(copy_in_(device, const_cast<void*>(host), num_bytes, queue));
  }
  int copy_out(void* host, const void* device, size_t num_bytes, void* queue) override {
    return told(copy_out_(host, const_cast<void*>(device), num_bytes, queue));
  }
  int fill(void* device, uint8_t value, size_t num_bytes, void* queue) override {
    return told(fill_(device, value, num_bytes, queue));
  }
  int create_event(void** event) override { return told(create_event_(event, 0)); }
  int destroy_event(void* event) override { return told(destroy_event_(event)); }
  int record_event(void* event, void* queue) override { return told(record_(event, queue)); }
  int elapsed(float* milliseconds, void* begin, void* end) override {
    return told(elapsed_(milliseconds, begin, end));
  }
  int load_module(void** module, const void* image) override { return told(load_(module, image)); }
  int unload_module(void* module) override { return told(unload_(module)); }
  int find_function(void** function, void* module, const char* name) override {
    return told(function_(function, module, name));
  }
  // every function may ask for all that a block can have
  int allow_dynamic(void*, uint32_t) override { return 0; }
  int launch(void* function, uint32_t grid_x, uint32_t grid_y, uint32_t threads,
             uint32_t dynamic_bytes, void* queue, void** arguments) override {
    return told(launch_(function, grid_x, grid_y, 1, threads, 1, 1, dynamic_bytes, queue, arguments,
                        nullptr));
  }
  std::string text(int status) override {
    const char* found = text_(status);
    return std::string(found == nullptr ? "unknown" : found) + " (HIP error " +
           std::to_string(status) + ")";
  }

 private:
  DriverDevice describe(int index, const std::vector<HipNode>& nodes);
  const HipNode* node_of(int device, const std::vector<HipNode>& nodes);
  std::string architectures() const;
  // A failure that the caller is told must not be found again by the process's framework, which
  // asks hipGetLastError() after its own calls.
  int told(int status) {
    if (status != 0) last_error_();
    return status;
  }

  std::vector<CodeObject> objects_;
  std::string topology_;
#define DFLASH_MEMBER(member, name, type) std::add_pointer_t<type> member = nullptr;
  DFLASH_HIP_FUNCTIONS(DFLASH_MEMBER)
#undef DFLASH_MEMBER
};

Status HipDriver::open(const DriverLibrary& library) {
#define DFLASH_FIND(member, name, type) DFLASH_TRY(library.find(#name, member));
  DFLASH_HIP_FUNCTIONS(DFLASH_FIND)
#undef DFLASH_FIND
  return ok();
}

Result<std::vector<DriverDevice>> HipDriver::list() {
  const int started = told(init_(0));
  if (started == kNoDevice || started == kInvalidDevice) return std::vector<DriverDevice>{};
  if (started == kInsufficientDriver) {
    return Error{ErrorCode::kUnsupported,
                 "the kernel's amdgpu driver is older than the HIP runtime; update it"};
  }
  if (started != 0)
    return Error{ErrorCode::kUnsupported, "the HIP runtime does not start: " + text(started)};
  int count = 0;
  if (const int status = told(count_(&count)); status != 0 && status != kNoDevice) {
    return Error{ErrorCode::kUnsupported,
                 "the HIP runtime does not list its devices: " + text(status)};
  }
  const std::vector<HipNode> nodes = read_hip_nodes(topology_);
  std::vector<DriverDevice> devices;
  for (int index = 0; index < count; ++index) devices.push_back(describe(index, nodes));
  return devices;
}

std::string HipDriver::architectures() const {
  std::string names;
  for (const CodeObject& object : objects_)
    names += (names.empty() ? "" : ", ") + std::string(object.architecture);
  return names;
}

// By the place on the bus: devices may be hidden or put in another order. Without one (a partition
// of a card, a virtual machine) the order counts, where the runtime sees as many devices as the
// kernel.
const HipNode* HipDriver::node_of(int device, const std::vector<HipNode>& nodes) {
  char text[32] = "";
  if (told(bus_id_(text, sizeof text, device)) == 0) {
    const std::optional<uint64_t> place =
        bus_place(std::string(text, ::strnlen(text, sizeof text)));
    for (const HipNode& node : nodes) {
      if (place && node.place == *place) return &node;
    }
  }
  int count = 0;
  if (told(count_(&count)) != 0 || nodes.size() != static_cast<size_t>(count)) return nullptr;
  return &nodes[static_cast<size_t>(device)];
}

// Where the architecture is not known, loading tells.
DriverDevice HipDriver::describe(int index, const std::vector<HipNode>& nodes) {
  DriverDevice found;
  found.facts.backend = "hip";
  found.facts.index = static_cast<uint32_t>(index);
  int device = 0;
  char name[256] = "unnamed";
  size_t total = 0;
  int status = device_(&device, index);
  if (status == 0) status = name_(name, sizeof name, device);
  if (status == 0) status = total_(&total, device);
  found.facts.name = std::string(name, ::strnlen(name, sizeof name));
  found.facts.memory_bytes = total;
  found.facts.wave_width = 64;
  if (told(status) != 0) {
    found.reason = "the HIP runtime does not describe it: " + text(status);
    return found;
  }
  const HipNode* node = node_of(index, nodes);
  if (node == nullptr) return found;
  found.facts.architecture = overridden_architecture(node->architecture);
  found.facts.num_units = node->num_units;
  found.facts.wave_width = node->wave_width;
  if (images(found.facts).empty()) {
    found.reason = "its architecture " + found.facts.architecture +
                   " is none of those that this build has kernels for: " + architectures();
  }
  return found;
}

std::vector<const void*> HipDriver::images(const DeviceFacts& facts) const {
  std::vector<const void*> fitting;
  for (const CodeObject& object : objects_) {
    if (facts.architecture.empty() || facts.architecture == object.architecture)
      fitting.push_back(object.image);
  }
  return fitting;
}

}  // namespace

Result<std::unique_ptr<DriverApi>> open_hip_driver(std::vector<CodeObject> objects,
                                                   const std::vector<std::string>& libraries,
                                                   const std::string& topology) {
  auto opened = DriverLibrary::open(libraries);
  if (!opened.ok()) return std::move(opened).error();
  auto driver = std::make_unique<HipDriver>(std::move(objects), topology);
  DFLASH_TRY(driver->open(opened.value()));
  return std::unique_ptr<DriverApi>(std::move(driver));
}

}  // namespace dflash::compute::gpu

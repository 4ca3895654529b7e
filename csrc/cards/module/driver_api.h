// What the module runtime needs of a vendor's driver, opened at run time: CUDA's driver API and
// HIP's module API are the same two dozen functions under other names. Functions return the
// vendor's status; 0 is success, and the two numbers below mean the same for both.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cards/device_runtime.h"

namespace dflash::compute::gpu {

inline constexpr int kDriverOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY, hipErrorOutOfMemory
inline constexpr int kDriverNotReady = 600;   // CUDA_ERROR_NOT_READY, hipErrorNotReady

// A device as the driver lists it. `reason` says why kernels of this build cannot run there; empty:
// they can.
struct DriverDevice {
  DeviceFacts facts;
  std::string reason;
};

class DriverApi {
 public:
  virtual ~DriverApi() = default;

  // Errors: kUnsupported where the driver is older than the build or refuses to start.
  virtual Result<std::vector<DriverDevice>> list() = 0;
  // The kernels' images that may be tried on this device, the best first. Not owned.
  virtual std::vector<const void*> images(const DeviceFacts& facts) const = 0;

  // Makes the device current for the calling thread, creating its context the first time; drop()
  // gives that back.
  virtual int use(uint32_t device) = 0;
  virtual void drop(uint32_t device) = 0;
  // What is current for the calling thread, and making that current again.
  virtual int current(void** saved) = 0;
  virtual int restore(void* saved) = 0;
  virtual int memory(size_t* free_bytes, size_t* all_bytes) = 0;
  virtual int allocate(void** memory, size_t num_bytes) = 0;
  virtual int release(void* memory) = 0;
  virtual int allocate_host(void** memory, size_t num_bytes) = 0;
  virtual int release_host(void* memory) = 0;
  // Host memory for kernels; and where they find it.
  virtual int map_host(void* memory, size_t num_bytes, bool is_read_only) = 0;
  virtual int unmap_host(void* memory) = 0;
  virtual int device_address(void** device, void* memory) = 0;
  virtual int create_queue(void** queue) = 0;
  virtual int destroy_queue(void* queue) = 0;
  virtual int query(void* queue) = 0;
  virtual int copy_in(void* device, const void* host, size_t num_bytes, void* queue) = 0;
  virtual int copy_out(void* host, const void* device, size_t num_bytes, void* queue) = 0;
  virtual int fill(void* device, uint8_t value, size_t num_bytes, void* queue) = 0;
  virtual int create_event(void** event) = 0;
  virtual int destroy_event(void* event) = 0;
  virtual int record_event(void* event, void* queue) = 0;
  virtual int elapsed(float* milliseconds, void* begin, void* end) = 0;
  virtual int load_module(void** module, const void* image) = 0;
  virtual int unload_module(void* module) = 0;
  virtual int find_function(void** function, void* module, const char* name) = 0;
  // Lets launches of the function ask for that much dynamic shared memory; needed above 48 KiB.
  virtual int allow_dynamic(void* function, uint32_t num_bytes) = 0;
  virtual int launch(void* function, uint32_t grid_x, uint32_t grid_y, uint32_t threads,
                     uint32_t dynamic_bytes, void* queue, void** arguments) = 0;
  virtual std::string text(int status) = 0;
};

}  // namespace dflash::compute::gpu

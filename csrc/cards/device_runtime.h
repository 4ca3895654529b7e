// What GpuLayer needs of a device, and nothing more: memory, one in-order queue, launches by kernel
// number, a wait with a bound. One implementation per vendor (cuda/, hip/) and the simulator
// (sim/). Kernels are found by name in the vendor's module (kernel_entries.h) and take one
// parameter: a trivially copyable struct, by value.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/result.h"
#include "cards/kernel_entries.h"

namespace dflash::compute::gpu {

struct DeviceFacts {
  std::string backend;          // "cuda" "hip", and "sim-cuda" "sim-hip" for the simulator
  std::string name;             // the vendor's, for messages
  std::string architecture;     // "sm_90", "gfx906"
  uint32_t index = 0;           // the vendor's device number
  uint32_t wave_width = 32;     // lanes that execute together: 32 or 64
  uint32_t num_units = 1;       // multiprocessors or compute units
  uint64_t memory_bytes = 0;    // in all
  bool has_warpgroups = false;  // the device and the loaded image multiply by warpgroups (sm_90a)
};

struct KernelLaunch {
  KernelId kernel{};
  uint32_t grid_x = 1;           // blocks; 0 in either direction launches nothing
  uint32_t grid_y = 1;           // <= 65535
  uint32_t threads = 1;          // per block, a multiple of 64
  const void* params = nullptr;  // read before launch() returns
  size_t params_bytes = 0;       // as its entry says
};

// Two places in the queue: elapsed_ns() is the device's time from one to the other.
enum class Mark : uint8_t { kBegin, kEnd };

// Not thread-safe: one thread at a time. Operations are queued in order and may run any time until
// wait() says they are done; host memory named by a copy stays valid and untouched until then. An
// error of the device (a fault of a kernel, a lost card) may be reported by any later call, and by
// all of them from then on. Errors: kWorkerFailed with the vendor's text and the device;
// kOutOfMemory from the allocations, naming the bytes asked for and those free.
class DeviceRuntime {
 public:
  // waits for nothing that hangs: at most a second, then gives the device up
  virtual ~DeviceRuntime() = default;

  virtual const DeviceFacts& facts() const = 0;
  virtual Result<uint64_t> free_bytes() = 0;

  // Device memory, aligned to 256 bytes, contents undefined. release(null) does nothing; the memory
  // must not be in use by the queue.
  virtual Result<std::byte*> allocate(uint64_t num_bytes) = 0;
  virtual void release(std::byte* memory) = 0;
  // Host memory that the device copies from and to fastest (pinned).
  virtual Result<std::byte*> allocate_staging(uint64_t num_bytes) = 0;
  virtual void release_staging(std::byte* memory) = 0;

  virtual Status copy_in(std::byte* device, const std::byte* host, uint64_t num_bytes) = 0;
  virtual Status copy_out(std::byte* host, const std::byte* device, uint64_t num_bytes) = 0;
  virtual Status fill(std::byte* device, uint8_t value, uint64_t num_bytes) = 0;
  virtual Status launch(const KernelLaunch& launch) = 0;
  // Queues a mark, in the place of the last one of its kind.
  virtual Status mark(Mark mark) = 0;
  // Between both marks, once wait() says that they have passed.
  virtual Result<int64_t> elapsed_ns() = 0;

  // True once everything queued is done, false if that takes longer than `at_most`.
  virtual Result<bool> wait(std::chrono::nanoseconds at_most) = 0;

  // Lets kernels use the host's memory [memory, memory + num_bytes), whole pages that stay mapped
  // until unmap_host(); returns the device's address of it. `is_read_only`: a mapping that this
  // process cannot write. Errors: kUnsupported with the driver's words.
  virtual Result<std::byte*> map_host(std::byte* memory, uint64_t num_bytes, bool is_read_only) = 0;
  virtual void unmap_host(std::byte* memory) = 0;
  // Queues what follows on a stream of the caller's framework, until return_queue().
  virtual void borrow_queue(uint64_t stream) = 0;
  virtual void return_queue() = 0;

  // Makes current again what was so for the calling thread before it used this device: its
  // framework relies on that. The next operation takes the device again. For devices that a
  // framework of the same process uses.
  virtual void leave() {}
  // The vendor's stream behind the queue; 0: none, because work is done by the thread that waits.
  virtual uint64_t stream() const { return 0; }
};

}  // namespace dflash::compute::gpu

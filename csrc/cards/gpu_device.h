// One device as its layers share it: the runtime behind a lock, the pinned staging buffer, and
// scratch memory that grows and is used again.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>

#include "cards/device_runtime.h"
#include "compute/yielding_progress.h"

namespace dflash::compute::gpu {

class GpuDevice {
 public:
  // `wait_limit` bounds every wait for the device: a kernel that takes longer counts as hung.
  // `batch_bytes` bounds the values that a batch keeps in scratch memory: larger ones are computed
  // in pieces (a single row may exceed it).
  explicit GpuDevice(std::unique_ptr<DeviceRuntime> runtime,
                     std::chrono::nanoseconds wait_limit = std::chrono::seconds(30),
                     uint64_t batch_bytes = uint64_t{256} << 20);
  ~GpuDevice();
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  const DeviceFacts& facts() const { return runtime_->facts(); }
  std::string name() const;  // "cuda 0 (NVIDIA H200)", for messages
  uint64_t batch_bytes() const { return batch_bytes_; }

  // Memory for a layer, zeroed. Any thread may call it. Errors: kOutOfMemory naming device, bytes
  // asked for and free.
  Result<std::byte*> allocate(uint64_t num_bytes);
  void release(std::byte* memory);
  Result<uint64_t> free_bytes();
  // Copies through the staging buffer and waits for it. Any thread may call it.
  Status store(std::byte* device, const std::byte* host, uint64_t num_bytes,
               YieldingProgress& progress);

  // A turn on the device. Other threads that want one wait until it is destroyed.
  class Turn {
   public:
    explicit Turn(GpuDevice& device) : device_(device), lock_(device.mutex_) {}
    DeviceRuntime& runtime() { return *device_.runtime_; }
    // Host memory that copies fastest, and device memory, both for the turn and with undefined
    // contents. A call may move what an earlier one gave, so the queue must be empty.
    Result<std::byte*> staging(uint64_t num_bytes) { return device_.grow_staging(num_bytes); }
    Result<std::byte*> scratch(uint64_t num_bytes) { return device_.grow_scratch(num_bytes); }
    // Waits until everything queued is done, and counts on `progress` every few milliseconds, which
    // may move bytes of a data path. Errors: kTimeout after the limit, and the device's.
    Status drain(YieldingProgress& progress) { return device_.drain(progress); }

   private:
    GpuDevice& device_;
    std::unique_lock<std::mutex> lock_;
  };

 private:
  Result<std::byte*> grow_staging(uint64_t num_bytes);
  Result<std::byte*> grow_scratch(uint64_t num_bytes);
  Status drain(YieldingProgress& progress);
  Error named(Error error) const { return std::move(error).with(name()); }

  std::unique_ptr<DeviceRuntime> runtime_;
  const std::chrono::nanoseconds wait_limit_;
  const uint64_t batch_bytes_;
  std::mutex mutex_;  // runtime_ and all below
  std::byte* staging_ = nullptr;
  uint64_t staging_bytes_ = 0;
  std::byte* scratch_ = nullptr;
  uint64_t scratch_bytes_ = 0;
  bool is_hung_ = false;
};

}  // namespace dflash::compute::gpu

// The device that a host's own tensors live on: copies between it and pinned memory, on a queue of
// its own. Any thread, one at a time; what was current for the thread is current again after every
// call, because its framework uses the device too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "cards/device_runtime.h"

namespace dflash::compute::gpu {

struct HostTransfer {
  std::byte* device;
  std::byte* host;
  uint64_t num_bytes;
};

class GpuHost {
 public:
  explicit GpuHost(std::unique_ptr<DeviceRuntime> runtime) : runtime_(std::move(runtime)) {}
  GpuHost(const GpuHost&) = delete;
  GpuHost& operator=(const GpuHost&) = delete;

  std::string name() const;  // "cuda 0 (NVIDIA H200)", for messages
  const DeviceFacts& facts() const { return runtime_->facts(); }
  uint64_t stream() const { return runtime_->stream(); }

  // The device for a scope, and the thread's own afterwards: for what queues work of its own.
  class Turn {
   public:
    explicit Turn(GpuHost& host) : host_(host), lock_(host.mutex_) {}
    ~Turn() { host_.runtime_->leave(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    DeviceRuntime& runtime() const { return *host_.runtime_; }
    // Until everything queued is done. Errors: the device's, and kTimeout where it did not end
    // within `at_most`; it then counts as hung.
    Status drain(std::chrono::nanoseconds at_most) const { return host_.drain(at_most); }
    bool is_hung() const { return host_.is_hung_; }
    void count_as_hung() const { host_.is_hung_ = true; }

   private:
    GpuHost& host_;
    std::lock_guard<std::mutex> lock_;
  };
  Error named(Error error) const { return std::move(error).with(name()); }

  // Errors: kOutOfMemory.
  Result<std::byte*> allocate_pinned(uint64_t num_bytes);
  void release_pinned(std::byte* memory);
  // Errors: the device's, and kTimeout where it did not end within `at_most`; it then counts as
  // hung, and every later call fails.
  Status copy_in(std::span<const HostTransfer> pieces, std::chrono::nanoseconds at_most);
  Status copy_out(std::span<const HostTransfer> pieces, std::chrono::nanoseconds at_most);

 private:
  Status drain(std::chrono::nanoseconds at_most);

  std::unique_ptr<DeviceRuntime> runtime_;
  std::mutex mutex_;  // runtime_ and below
  bool is_hung_ = false;
};

}  // namespace dflash::compute::gpu

// What layers share of a device.
// SPDX-License-Identifier: Apache-2.0
#include "cards/gpu_device.h"

#include <algorithm>
#include <cstring>

namespace dflash::compute::gpu {
namespace {

// Well below the 20 ms within which a worker must show progress.
constexpr std::chrono::milliseconds kProgressEvery{5};
constexpr uint64_t kStoreBytes = uint64_t{4} << 20;  // of staging per copy while experts load

}  // namespace

GpuDevice::GpuDevice(std::unique_ptr<DeviceRuntime> runtime, std::chrono::nanoseconds wait_limit,
                     uint64_t batch_bytes)
    : runtime_(std::move(runtime)), wait_limit_(wait_limit), batch_bytes_(batch_bytes) {}

GpuDevice::~GpuDevice() {
  if (is_hung_) return;  // the runtime gives the device up, memory and all
  runtime_->release(scratch_);
  if (staging_ != nullptr) runtime_->release_staging(staging_);
}

std::string GpuDevice::name() const {
  const DeviceFacts& found = facts();
  return found.backend + " " + std::to_string(found.index) + " (" + found.name + ")";
}

Result<std::byte*> GpuDevice::allocate(uint64_t num_bytes) {
  Turn turn(*this);
  auto memory = runtime_->allocate(num_bytes);
  if (!memory.ok()) return named(std::move(memory).error());
  YieldingProgress unseen{0};
  Status status = runtime_->fill(memory.value(), 0, num_bytes);
  if (status.ok()) status = drain(unseen);
  if (status.ok()) return memory;
  runtime_->release(memory.value());
  return std::move(status).error();
}

void GpuDevice::release(std::byte* memory) {
  if (memory == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_hung_) runtime_->release(memory);
}

Result<uint64_t> GpuDevice::free_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return runtime_->free_bytes();
}

Status GpuDevice::store(std::byte* device, const std::byte* host, uint64_t num_bytes,
                        YieldingProgress& progress) {
  Turn turn(*this);
  for (uint64_t done = 0; done < num_bytes;) {
    const uint64_t size = std::min(kStoreBytes, num_bytes - done);
    auto staging = turn.staging(size);
    if (!staging.ok()) return std::move(staging).error();
    std::memcpy(staging.value(), host + done, size);
    DFLASH_TRY(runtime_->copy_in(device + done, staging.value(), size));
    DFLASH_TRY(drain(progress));
    done += size;
  }
  return ok();
}

Result<std::byte*> GpuDevice::grow_staging(uint64_t num_bytes) {
  if (num_bytes <= staging_bytes_) return staging_;
  if (staging_ != nullptr) runtime_->release_staging(staging_);
  staging_ = nullptr;
  staging_bytes_ = 0;
  auto grown = runtime_->allocate_staging(num_bytes + num_bytes / 4);
  if (!grown.ok()) return named(std::move(grown).error());
  staging_ = grown.value();
  staging_bytes_ = num_bytes + num_bytes / 4;
  return staging_;
}

Result<std::byte*> GpuDevice::grow_scratch(uint64_t num_bytes) {
  if (num_bytes <= scratch_bytes_) return scratch_;
  runtime_->release(scratch_);
  scratch_ = nullptr;
  scratch_bytes_ = 0;
  uint64_t wanted = num_bytes + num_bytes / 4;
  auto grown = runtime_->allocate(wanted);
  if (!grown.ok() && grown.error().code == ErrorCode::kOutOfMemory)
    grown = runtime_->allocate(wanted = num_bytes);
  if (!grown.ok()) return named(std::move(grown).error().with("scratch memory for a batch"));
  scratch_ = grown.value();
  scratch_bytes_ = wanted;
  return scratch_;
}

Status GpuDevice::drain(YieldingProgress& progress) {
  if (is_hung_)
    return Error{ErrorCode::kWorkerFailed,
                 name() + " did not answer within its limit before; restart the worker"};
  const auto deadline = std::chrono::steady_clock::now() + wait_limit_;
  while (true) {
    auto is_done = runtime_->wait(std::min<std::chrono::nanoseconds>(kProgressEvery, wait_limit_));
    if (!is_done.ok()) return named(std::move(is_done).error());
    // In a worker, the serving thread may move bytes of its data path here.
    progress.count_and_yield();
    if (is_done.value()) return ok();
    if (std::chrono::steady_clock::now() < deadline) continue;
    is_hung_ = true;
    return Error{
        ErrorCode::kTimeout,
        name() + " did not finish within " +
            std::to_string(
                std::chrono::duration_cast<std::chrono::milliseconds>(wait_limit_).count()) +
            " ms; it counts as hung"};
  }
}

}  // namespace dflash::compute::gpu

// SPDX-License-Identifier: Apache-2.0
#include "plugin/host_device.h"

#include <bit>
#include <utility>

#include "plugin/abi_records.h"

namespace dflash::plugin {
namespace {

constexpr int64_t kCopyTimeoutNs = 30'000'000'000;         // 64 MiB take a millisecond: only a lost or hung device is that late
constexpr uint64_t kLeastBlockBytes = 64 << 10;
constexpr uint64_t kMostPooledBytes = uint64_t{256} << 20;  // pinned memory that nobody uses, at most

}  // namespace

Result<std::shared_ptr<HostDevice>> HostDevice::open(const dflash_host_table& table, uint32_t device) {
  const std::string asked = std::string(table.name) + ":" + std::to_string(device);
  auto options = new_record<dflash_open_options>();
  options.num_threads = 1;
  options.seed = 1;
  auto error = new_record<dflash_error>();
  dflash_host* opened = nullptr;
  if (const int32_t status = table.open(device, &options, &opened, &error); status != 0) {
    return error_of(status, error).with("host.device " + asked);
  }
  std::shared_ptr<HostDevice> host(new HostDevice(table, opened));
  auto info = new_record<dflash_host_info>();
  if (const int32_t status = table.info(opened, &info, &error); status != 0) return error_of(status, error).with("host.device " + asked);
  host->name_ = text_of(info.name);
  host->dlpack_type_ = info.dlpack_type;
  host->dlpack_id_ = info.dlpack_id;
  host->stream_ = info.stream;
  return host;
}

HostDevice::~HostDevice() {
  for (const auto& [num_bytes, blocks] : pool_) {
    for (std::byte* memory : blocks) table_.release_pinned(host_, memory);
  }
  table_.close(host_);
}

Result<std::unique_ptr<HostDevice::Block>> HostDevice::staging(uint64_t num_bytes) {
  const uint64_t size = std::bit_ceil(num_bytes < kLeastBlockBytes ? kLeastBlockBytes : num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::byte*>& blocks = pool_[size];
  if (!blocks.empty()) {
    std::byte* memory = blocks.back();
    blocks.pop_back();
    pooled_bytes_ -= size;
    return std::make_unique<Block>(shared_from_this(), memory, size);
  }
  void* memory = nullptr;
  auto error = new_record<dflash_error>();
  if (const int32_t status = table_.allocate_pinned(host_, size, &memory, &error); status != 0) {
    return error_of(status, error).with("host.device");
  }
  return std::make_unique<Block>(shared_from_this(), static_cast<std::byte*>(memory), size);
}

void HostDevice::give_back(std::byte* memory, uint64_t num_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pooled_bytes_ + num_bytes > kMostPooledBytes) return table_.release_pinned(host_, memory);
  pool_[num_bytes].push_back(memory);
  pooled_bytes_ += num_bytes;
}

Status HostDevice::copy_in(std::span<const dflash_transfer> pieces) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  const int32_t status = table_.copy_in(host_, pieces.data(), static_cast<uint32_t>(pieces.size()), kCopyTimeoutNs, &error);
  if (status != 0) return error_of(status, error).with("host.device");
  return ok();
}

Status HostDevice::copy_out(std::span<const dflash_transfer> pieces) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  const int32_t status = table_.copy_out(host_, pieces.data(), static_cast<uint32_t>(pieces.size()), kCopyTimeoutNs, &error);
  if (status != 0) return error_of(status, error).with("host.device");
  return ok();
}

}  // namespace dflash::plugin

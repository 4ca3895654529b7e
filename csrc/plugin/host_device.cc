// SPDX-License-Identifier: Apache-2.0
#include "plugin/host_device.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "plugin/abi_records.h"

namespace dflash::plugin {
namespace {

// 64 MiB take a millisecond: only a lost or hung device is that late
constexpr int64_t kCopyTimeoutNs = 30'000'000'000;
constexpr uint64_t kLeastBlockBytes = 64 << 10;
// How much pinned memory that nobody uses is kept, at most.
constexpr uint64_t kMostPooledBytes = uint64_t{256} << 20;

}  // namespace

Result<std::shared_ptr<HostDevice>> HostDevice::open(const dflash_host_table& table,
                                                     uint32_t device) {
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
  if (const int32_t status = table.info(opened, &info, &error); status != 0)
    return error_of(status, error).with("host.device " + asked);
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
  keep_mapped({});
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

Status HostDevice::done(int32_t status, const dflash_error& error) const {
  if (status != 0) return error_of(status, error).with("host.device");
  return ok();
}

Status HostDevice::copy_in(std::span<const dflash_transfer> pieces) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  return done(table_.copy_in(host_, pieces.data(), static_cast<uint32_t>(pieces.size()),
                             kCopyTimeoutNs, &error),
              error);
}

Status HostDevice::copy_out(std::span<const dflash_transfer> pieces) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  return done(table_.copy_out(host_, pieces.data(), static_cast<uint32_t>(pieces.size()),
                              kCopyTimeoutNs, &error),
              error);
}

Result<std::byte*> HostDevice::map_memory(std::byte* base, uint64_t num_bytes, bool is_read_only,
                                          std::shared_ptr<void> memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = mapped_.find(base); found != mapped_.end()) return found->second.device;
  void* device = nullptr;
  auto error = new_record<dflash_error>();
  const int32_t status =
      table_.map_memory(host_, base, num_bytes, is_read_only ? 1 : 0, &device, &error);
  DFLASH_TRY(done(status, error));
  mapped_[base] = {static_cast<std::byte*>(device), std::move(memory)};
  return static_cast<std::byte*>(device);
}

void HostDevice::keep_mapped(std::span<std::byte* const> bases) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = mapped_.begin(); at != mapped_.end();) {
    if (std::find(bases.begin(), bases.end(), at->first) != bases.end()) {
      ++at;
      continue;
    }
    table_.unmap_memory(host_, at->first);
    at = mapped_.erase(at);
  }
}

Status HostDevice::step_layer(const dflash_step_layer& layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  return done(table_.step_layer(host_, &layer, &error), error);
}

Status HostDevice::step_begin(const dflash_step& step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  return done(table_.step_begin(host_, &step, &error), error);
}

Status HostDevice::step_add(const dflash_step_call& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  return done(table_.step_add(host_, &call, &error), error);
}

Result<bool> HostDevice::step_wait(int64_t timeout_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  uint32_t is_done = 0;
  DFLASH_TRY(done(table_.step_wait(host_, timeout_ns, &is_done, &error), error));
  return is_done != 0;
}

Status HostDevice::step_end(dflash_step_outcome& outcome) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto error = new_record<dflash_error>();
  return done(table_.step_end(host_, &outcome, &error), error);
}

void HostDevice::step_give_up() {
  const std::lock_guard<std::mutex> lock(mutex_);
  table_.step_give_up(host_);
}

}  // namespace dflash::plugin

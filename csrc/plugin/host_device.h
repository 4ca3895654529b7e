// The device that a host's own tensors live on: the core's side of the C table in host_abi.h. Any
// thread; copies take their turn. Every error names the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "plugin/host_abi.h"

namespace dflash::plugin {

class HostDevice : public std::enable_shared_from_this<HostDevice> {
 public:
  // `table` was checked (loader.h). Errors: kInvalidArgument for a device that does not exist;
  // kUnsupported with the reason where it cannot be used; those of the plug-in.
  static Result<std::shared_ptr<HostDevice>> open(const dflash_host_table& table, uint32_t device);
  ~HostDevice();
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  const std::string& name() const { return name_; }
  int32_t dlpack_type() const { return dlpack_type_; }
  int32_t dlpack_id() const { return dlpack_id_; }
  uint64_t stream() const { return stream_; }

  // Pinned memory for a while: given back to the device's pool when it dies. Keeps the device open.
  class Block {
   public:
    Block(std::shared_ptr<HostDevice> device, std::byte* memory, uint64_t num_bytes)
        : device_(std::move(device)), memory_(memory), num_bytes_(num_bytes) {}
    ~Block() { device_->give_back(memory_, num_bytes_); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    std::byte* memory() const { return memory_; }

   private:
    std::shared_ptr<HostDevice> device_;
    std::byte* memory_;
    uint64_t num_bytes_;
  };
  // At least `num_bytes`, contents undefined. Errors: kOutOfMemory.
  Result<std::unique_ptr<Block>> staging(uint64_t num_bytes);

  // Copies all pieces and returns when they are there. Errors: kTimeout and kWorkerFailed with the
  // driver's words.
  Status copy_in(std::span<const dflash_transfer> pieces);
  Status copy_out(std::span<const dflash_transfer> pieces);

  // Device steps (host_abi.h). `memory` keeps what is mapped alive; the same base is mapped once.
  Result<std::byte*> map_memory(std::byte* base, uint64_t num_bytes, bool is_read_only,
                                std::shared_ptr<void> memory);
  // Unmaps everything whose base is not among `bases`.
  void keep_mapped(std::span<std::byte* const> bases);
  Status step_layer(const dflash_step_layer& layer);
  Status step_begin(const dflash_step& step);
  Status step_add(const dflash_step_call& call);
  Result<bool> step_wait(int64_t timeout_ns);
  void step_abort() { table_.step_abort(host_); }  // no lock: another thread may wait
  Status step_end(dflash_step_outcome& outcome);
  void step_give_up();

 private:
  struct Mapped {
    std::byte* device;
    std::shared_ptr<void> memory;
  };
  Status done(int32_t status, const dflash_error& error) const;
  HostDevice(const dflash_host_table& table, dflash_host* host) : table_(table), host_(host) {}
  void give_back(std::byte* memory, uint64_t num_bytes);

  const dflash_host_table& table_;
  dflash_host* host_;
  std::string name_;
  int32_t dlpack_type_ = 0, dlpack_id_ = 0;
  uint64_t stream_ = 0;
  std::mutex mutex_;                                  // the pool and every use of host_
  std::map<uint64_t, std::vector<std::byte*>> pool_;  // by size
  uint64_t pooled_bytes_ = 0;
  std::map<std::byte*, Mapped> mapped_;
};

}  // namespace dflash::plugin

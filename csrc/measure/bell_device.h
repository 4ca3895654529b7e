// A device that rings: the side of _measure of the C table in bells/bells_abi.h. One thread at a
// time uses it, and every error names the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "measure/bells/bells_abi.h"

namespace dflash::measure {

class BellDevice {
 public:
  // Opens libdflash_<backend>_measure.so beside this library. Errors: kUnsupported where it is
  // missing or of another build, with what to do; kInvalidArgument for a device that does not
  // exist; those of the driver.
  static Result<std::unique_ptr<BellDevice>> open(const std::string& backend, uint32_t device,
                                                  const std::string& directory);
  ~BellDevice() { table_.close(device_); }
  BellDevice(const BellDevice&) = delete;
  BellDevice& operator=(const BellDevice&) = delete;

  const std::string& name() const { return name_; }  // such as "cuda 0 (NVIDIA H200)"

  Result<std::byte*> allocate_pinned(uint64_t num_bytes);
  void release_pinned(std::byte* memory) { table_.release_pinned(device_, memory); }
  // Maps whole pages for the device until they are unmapped, and returns the device's address.
  Result<std::byte*> map_memory(std::byte* memory, uint64_t num_bytes, bool is_read_only);
  void unmap_memory(std::byte* memory) { table_.unmap_memory(device_, memory); }
  // Rings by `bells`. Takes at most as long as its budget says, and a little more.
  Status ring(dflash_bell_rounds& bells);

 private:
  BellDevice(const dflash_bells_table& table, dflash_bell_device* device, std::string name)
      : table_(table), device_(device), name_(std::move(name)) {}

  const dflash_bells_table& table_;
  dflash_bell_device* const device_;
  const std::string name_;
};

}  // namespace dflash::measure

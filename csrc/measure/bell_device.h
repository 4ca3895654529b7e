// A device that rings: the side of _measure of the C table in bells/bells_abi.h; and the processor
// that answers. One thread at a time uses a device, and every error names it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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

// The processor's end of a device's ping-pong, for `bench.lab doorbell`. It answers every number
// that appears in one word with the same number in another, and notes when. Both words may lie in
// memory that another process or a device shares.
struct BellEcho {
  uint32_t* ring = nullptr;    // the device writes it, this end only reads
  uint32_t* answer = nullptr;  // this end writes it
  uint32_t first = 1, num_rounds = 1;
  int64_t timeout_ns = 0;  // for all rounds together
};

// Returns when each round's number was seen, by now_ns(). There are fewer than `num_rounds` if the
// time was over. Numbers come in turn, with none left out.
std::vector<int64_t> answer_bells(const BellEcho& echo);

}  // namespace dflash::measure

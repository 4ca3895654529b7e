// What a backend of this project is, in C++: devices that can be listed and opened, and an
// ExpertBackend on an open one. device_table.h turns any of them into the C table.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "compute/experts/expert_backend.h"

namespace dflash::plugin {

// One device as probing finds it. `reason` says why it cannot be used; empty: it can.
struct DeviceListing {
  std::string name, vendor, arch;
  uint64_t memory_bytes = 0;
  std::string reason;
};

struct OpenOptions {
  uint32_t num_threads = 1;
  uint64_t seed = 1;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual compute::ExpertBackend& backend() = 0;
  virtual bool takes(compute::WeightFormat format) const = 0;
  virtual bool computes(compute::NumericsClass numerics) const = 0;
  // Whether its kernels have to agree with the reference before a layer is defined: hardware that
  // this project's own tests never ran on.
  virtual bool must_prove() const { return false; }
  virtual uint32_t max_rows() const = 0;  // of one batch
  virtual Result<uint64_t> free_bytes() = 0;
  virtual uint64_t layer_bytes(const compute::FfnSpec& spec, uint32_t num_local_experts,
                               compute::ResidentFormats formats) const = 0;
};

}  // namespace dflash::plugin

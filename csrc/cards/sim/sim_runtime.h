// The simulated device: a DeviceRuntime whose kernels are the vendors' sources compiled for the
// CPU, run block by block over fibres. As on a device, nothing happens before wait(), and after an
// error every call reports it. For tests, and for the `sim` backend.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "cards/device_runtime.h"
#include "cards/sim/sim_kernels.h"

namespace dflash::compute::gpu {

enum class SimulatedVendor : uint8_t { kCuda, kHip };  // waves of 32, waves of 64

struct SimulatedDevice {
  SimulatedVendor vendor = SimulatedVendor::kCuda;
  uint64_t memory_bytes = uint64_t{1} << 30;
  uint64_t seed = 1;            // of the order of blocks and threads
  bool has_warpgroups = false;  // products by warpgroups, as sm_90a
  // a framework allocates too: copies are not held against this runtime's own allocations
  bool has_foreign_memory = false;
};

// `module`: the kernels that can be launched. Errors: kOutOfMemory.
Result<std::unique_ptr<DeviceRuntime>> make_simulated_runtime(
    const SimulatedDevice& device, const sim::Module& module = sim::expert_module());

}  // namespace dflash::compute::gpu

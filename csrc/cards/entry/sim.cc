// libdflash_sim.so: the GPU kernels on the processor. Device 0 stands for NVIDIA's cards, device 1
// for AMD's with waves of 64.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include "cards/device_exchange/sim/exchange_module.h"
#include "cards/entry/gpu_plugin.h"
#include "cards/entry/host_table.h"
#include "cards/sim/sim_runtime.h"
#include "plugin/device_table.h"

namespace dflash::plugin {
namespace {

using compute::gpu::SimulatedDevice;
using compute::gpu::SimulatedVendor;

// The simulated memory is the machine's: as much as a worker that computes there could take.
uint64_t machine_bytes() {
  return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) *
         static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES));
}

struct SimDriver {
  static constexpr const char* kName = "sim";

  static Result<std::vector<DeviceListing>> list() {
    return std::vector<DeviceListing>{
        {"simulated card, 32-wide waves", "cuda", "sim-cuda", machine_bytes(), ""},
        {"simulated card, 64-wide waves", "hip",  "sim-hip",  machine_bytes(), ""}
    };
  }

  static Result<std::unique_ptr<Device>> open(uint32_t device, const OpenOptions& options) {
    const SimulatedVendor vendor = device == 0 ? SimulatedVendor::kCuda : SimulatedVendor::kHip;
    auto runtime = compute::gpu::make_simulated_runtime(
        SimulatedDevice{vendor, machine_bytes(), options.seed});
    if (!runtime.ok()) return std::move(runtime).error();
    return std::unique_ptr<Device>(
        std::make_unique<GpuPluginDevice>(std::move(runtime).value(), false));
  }

  // Tensors of the processor stand in for those of a card: the framework's memory is not this
  // runtime's.
  static constexpr int32_t kDlpackType = DFLASH_DLPACK_CPU;
  static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open_for_host(
      uint32_t device, const OpenOptions& options) {
    if (device > 1)
      return Error{ErrorCode::kInvalidArgument, "device sim:" + std::to_string(device) +
                                                    " does not exist; there are sim:0 and sim:1"};
    const SimulatedVendor vendor = device == 0 ? SimulatedVendor::kCuda : SimulatedVendor::kHip;
    auto runtime =
        compute::gpu::make_simulated_runtime(SimulatedDevice{.vendor = vendor,
                                                             .memory_bytes = machine_bytes(),
                                                             .seed = options.seed,
                                                             .has_foreign_memory = true},
                                             device_exchange::exchange_module());
    if (!runtime.ok()) return std::move(runtime).error();
    return std::unique_ptr<compute::gpu::DeviceRuntime>(std::move(runtime).value());
  }
};

}  // namespace
}  // namespace dflash::plugin

DFLASH_PLUGIN_EXPORT const dflash_backend_table* dflash_backend() {
  return dflash::plugin::table_of<dflash::plugin::SimDriver>();
}
DFLASH_PLUGIN_EXPORT const dflash_host_table* dflash_host_device() {
  return dflash::plugin::host_table_of<dflash::plugin::SimDriver>();
}

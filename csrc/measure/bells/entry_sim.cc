// libdflash_sim_measure.so: a doorbell on the simulated cards. Device 0 stands for a card of
// NVIDIA, device 1 for one of AMD.
// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "cards/entry/export.h"
#include "measure/bells/bell_table.h"
#include "measure/bells/sim_bells.h"

namespace dflash::measure {
namespace {

struct Sim {
  static constexpr const char* kName = "sim";
  static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open(uint32_t device) {
    if (device > 1)
      return Error{ErrorCode::kInvalidArgument, "device sim:" + std::to_string(device) +
                                                    " does not exist; there are sim:0 and sim:1"};
    using compute::gpu::SimulatedVendor;
    auto runtime = compute::gpu::make_simulated_runtime(
        {.vendor = device == 0 ? SimulatedVendor::kCuda : SimulatedVendor::kHip}, bell_module());
    if (!runtime.ok()) return std::move(runtime).error();
    return std::unique_ptr<compute::gpu::DeviceRuntime>(std::move(runtime).value());
  }
};

}  // namespace
}  // namespace dflash::measure

DFLASH_PLUGIN_EXPORT const dflash_bells_table* dflash_bells() {
  return dflash::measure::bells_table_of<dflash::measure::Sim>();
}

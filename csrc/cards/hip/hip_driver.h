// HIP's module API, opened at run time from the ROCm that the card's owner has: libamdhip64 of
// major version 7, 6 or 5. Only functions whose signature is the same in all three are used; what
// their property structs would tell is read from the kernel driver in sysfs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cards/module/driver_api.h"
#include "cards/module/driver_library.h"

namespace dflash::compute::gpu {

// One code object of the kernels and the architecture it was compiled for, such as "gfx906".
struct CodeObject {
  const char* architecture;
  const void* image;
};

// First the one that is in the process already: a framework may bring its own, whose memory and
// streams another knows nothing of.
inline std::vector<std::string> hip_libraries() {
  std::vector<std::string> names = loaded_libraries("libamdhip64.so");
  names.insert(names.end(), {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"});
  return names;
}

// Errors: kUnsupported where no library is there, or it is older than this build.
Result<std::unique_ptr<DriverApi>> open_hip_driver(
    std::vector<CodeObject> objects, const std::vector<std::string>& libraries = hip_libraries(),
    const std::string& topology = "/sys/class/kfd/kfd/topology/nodes");

// What the kernel driver says of the GPUs of this machine, in the order of its nodes
// (hip_nodes.cc).
struct HipNode {
  uint64_t place = 0;        // on the bus, as bus_place() has it
  std::string architecture;  // "gfx90a"
  uint32_t num_units = 1;
  uint32_t wave_width = 64;
};
std::vector<HipNode> read_hip_nodes(const std::string& topology);
// Domain, bus, device and function of "0000:c3:00.0" in one number; nothing where it is something
// else.
std::optional<uint64_t> bus_place(const std::string& bus_id);
// "gfx90a" of 90010.
std::string architecture_name(uint64_t target_version);

}  // namespace dflash::compute::gpu

// The GPUs in the kernel driver's topology: one folder per node, "properties" with a name and a
// number per line; processors have no gfx_target_version.
// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include "cards/hip/hip_driver.h"

namespace dflash::compute::gpu {
namespace {

constexpr size_t kMostNodes = 1024;

std::map<std::string, uint64_t> read_properties(const std::filesystem::path& file) {
  std::map<std::string, uint64_t> properties;
  std::ifstream stream(file);
  std::string name;
  uint64_t value = 0;
  while (stream >> name >> value) properties[name] = value;
  return properties;
}

}  // namespace

std::string architecture_name(uint64_t target_version) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "gfx" + std::to_string(target_version / 10000);
  name += kDigits[target_version / 100 % 100 % 16];
  name += kDigits[target_version % 100 % 16];
  return name;
}

std::optional<uint64_t> bus_place(const std::string& bus_id) {
  unsigned domain = 0, bus = 0, device = 0, function = 0;
  if (::sscanf(bus_id.c_str(), "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
    return std::nullopt;
  return uint64_t{domain} << 16 | (bus & 0xff) << 8 | (device & 0x1f) << 3 | (function & 7);
}

std::vector<HipNode> read_hip_nodes(const std::string& topology) {
  std::vector<HipNode> nodes;
  for (size_t number = 0; number < kMostNodes; ++number) {  // numbered without gaps
    const std::filesystem::path folder = std::filesystem::path(topology) / std::to_string(number);
    std::error_code failure;
    if (!std::filesystem::is_directory(folder, failure)) break;
    const auto properties = read_properties(folder / "properties");
    const auto value = [&properties](const char* name) {
      const auto found = properties.find(name);
      return found == properties.end() ? uint64_t{0} : found->second;
    };
    if (value("gfx_target_version") == 0) continue;
    HipNode node;
    // above: a partition's number
    node.place = value("domain") << 16 | (value("location_id") & 0xffff);
    node.architecture = architecture_name(value("gfx_target_version"));
    const uint64_t units = value("simd_count") / std::max<uint64_t>(1, value("simd_per_cu"));
    node.num_units = static_cast<uint32_t>(std::clamp<uint64_t>(units, 1, 4096));
    if (value("wave_front_size") == 32) node.wave_width = 32;
    nodes.push_back(node);
  }
  return nodes;
}

}  // namespace dflash::compute::gpu

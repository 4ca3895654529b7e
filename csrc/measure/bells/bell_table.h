// The C table (bells_abi.h) of a plug-in that measures doorbells: `bells_table_of<Vendor>()`. A
// Vendor names the backend and opens a device:
//
//   static constexpr const char* kName;
//   // A device with the kernel of gpu_bells.h.
//   static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open(uint32_t device);
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <set>
#include <string>
#include <utility>

#include "measure/bells/bells_abi.h"
#include "measure/bells/gpu_bells.h"
#include "plugin/abi_records.h"

// What the table's device stands for. Its maps end before its host does.
struct dflash_bell_device {
  explicit dflash_bell_device(std::unique_ptr<dflash::compute::gpu::DeviceRuntime> runtime)
      : host(std::move(runtime)), bells(host) {}
  ~dflash_bell_device() {
    while (!mapped.empty()) unmap(*mapped.begin());
  }
  void unmap(std::byte* memory) {
    const dflash::compute::gpu::GpuHost::Turn turn(host);
    // Memory that a hung device may still use stays mapped.
    if (mapped.erase(memory) != 0 && !turn.is_hung()) turn.runtime().unmap_host(memory);
  }

  dflash::compute::gpu::GpuHost host;
  dflash::measure::GpuBells bells;
  std::set<std::byte*> mapped;
};

namespace dflash::measure {
namespace internal {

using plugin::answered;
using plugin::missing;

inline int32_t allocate_pinned(dflash_bell_device* device, uint64_t num_bytes, void** memory,
                               dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (device == nullptr || memory == nullptr) return missing("bells table: device or memory");
    auto allocated = device->host.allocate_pinned(num_bytes);
    if (!allocated.ok()) return std::move(allocated).error();
    *memory = allocated.value();
    return ok();
  });
}

inline int32_t map_memory(dflash_bell_device* device, void* memory, uint64_t num_bytes,
                          uint32_t is_read_only, void** mapped, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (device == nullptr || memory == nullptr || mapped == nullptr)
      return missing("bells table: device, memory or mapped");
    const compute::gpu::GpuHost::Turn turn(device->host);
    auto* base = static_cast<std::byte*>(memory);
    auto found = turn.runtime().map_host(base, num_bytes, is_read_only != 0);
    if (!found.ok()) return device->host.named(std::move(found).error());
    device->mapped.insert(base);
    *mapped = found.value();
    return ok();
  });
}

inline int32_t ring(dflash_bell_device* device, dflash_bell_rounds* given, dflash_error* error) {
  return answered(error, [&]() -> Status {
    dflash_bell_rounds bells = plugin::read_record(given);
    if (device == nullptr || bells.ring == nullptr || bells.answer == nullptr)
      return missing("bells table: device or a word");
    auto rung = device->bells.ring({static_cast<uint32_t*>(bells.ring),
                                    static_cast<const uint32_t*>(bells.answer), bells.first,
                                    bells.num_rounds, std::chrono::nanoseconds(bells.budget_ns)});
    if (!rung.ok()) return std::move(rung).error();
    bells.num_done = rung.value();
    plugin::write_record(given, bells);
    return ok();
  });
}

}  // namespace internal

template <class Vendor>
const dflash_bells_table* bells_table_of() {
  static const dflash_bells_table table = [] {
    dflash_bells_table filled{};
    filled.struct_size = sizeof filled;
    filled.abi_version = DFLASH_BELLS_ABI_VERSION;
    filled.name = Vendor::kName;
    filled.version = DFLASH_VERSION;
    filled.open = [](uint32_t device, dflash_bell_device** opened, char* name,
                     dflash_error* error) {
      return plugin::answered(error, [&]() -> Status {
        if (opened == nullptr || name == nullptr)
          return plugin::missing("bells table: device or name");
        auto runtime = Vendor::open(device);
        if (!runtime.ok()) return std::move(runtime).error();
        auto box = std::make_unique<dflash_bell_device>(std::move(runtime).value());
        plugin::set_text(*reinterpret_cast<char (*)[DFLASH_TEXT_BYTES]>(name), box->host.name());
        *opened = box.release();
        return ok();
      });
    };
    filled.close = [](dflash_bell_device* device) { delete device; };
    filled.allocate_pinned = &internal::allocate_pinned;
    filled.release_pinned = [](dflash_bell_device* device, void* memory) {
      if (device != nullptr) device->host.release_pinned(static_cast<std::byte*>(memory));
    };
    filled.map_memory = &internal::map_memory;
    filled.unmap_memory = [](dflash_bell_device* device, void* memory) {
      if (device != nullptr) device->unmap(static_cast<std::byte*>(memory));
    };
    filled.ring = &internal::ring;
    return filled;
  }();
  return &table;
}

}  // namespace dflash::measure

// The host's table (host_abi.h) of a plug-in: `host_table_of<Driver>()`. A Driver has, beside what device_table.h asks for,
//
//   static constexpr int32_t kDlpackType;
//   static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open_for_host(uint32_t device, const OpenOptions& options);
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "compute/gpu/gpu_host.h"
#include "plugin/abi_records.h"
#include "plugin/device.h"
#include "plugin/device_table.h"
#include "plugin/host_abi.h"

struct dflash_host {
  dflash_host(std::unique_ptr<dflash::compute::gpu::DeviceRuntime> runtime, int32_t type) : device(std::move(runtime)), dlpack_type(type) {}
  dflash::compute::gpu::GpuHost device;
  const int32_t dlpack_type;
};

namespace dflash::plugin {
namespace host_internal {

// Runs `body` (Status()); whatever it cannot allocate becomes an error, since nothing may be thrown through the table.
template <class Body>
int32_t answered(dflash_error* error, Body&& body) {
  try {
    const Status done = body();
    return done.ok() ? 0 : report(done.error(), error);
  } catch (const std::bad_alloc&) {
    return report(Error{ErrorCode::kOutOfMemory, "the host's device could not allocate memory of the host"}, error);
  }
}

inline Error missing(const char* what) { return Error{ErrorCode::kInvalidArgument, std::string("host table: ") + what + " is null"}; }

inline int32_t info(dflash_host* host, dflash_host_info* found, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (host == nullptr) return missing("host");
    auto record = new_record<dflash_host_info>();
    record.dlpack_type = host->dlpack_type;
    record.dlpack_id = host->dlpack_type == DFLASH_DLPACK_CPU ? 0 : static_cast<int32_t>(host->device.facts().index);
    record.stream = host->device.stream();
    set_text(record.name, host->device.name());
    write_record(found, record);
    return ok();
  });
}

inline int32_t allocate_pinned(dflash_host* host, uint64_t num_bytes, void** memory, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (host == nullptr || memory == nullptr) return missing("host or memory");
    auto allocated = host->device.allocate_pinned(num_bytes);
    if (!allocated.ok()) return std::move(allocated).error();
    *memory = allocated.value();
    return ok();
  });
}

template <bool kIsIn>
int32_t copy(dflash_host* host, const dflash_transfer* pieces, uint32_t num_pieces, int64_t timeout_ns, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (host == nullptr || (pieces == nullptr && num_pieces > 0)) return missing("host or pieces");
    std::vector<compute::gpu::HostTransfer> transfers;
    for (uint32_t i = 0; i < num_pieces; ++i) {
      transfers.push_back({static_cast<std::byte*>(pieces[i].device), static_cast<std::byte*>(pieces[i].host), pieces[i].num_bytes});
    }
    const std::chrono::nanoseconds at_most(timeout_ns);
    return kIsIn ? host->device.copy_in(transfers, at_most) : host->device.copy_out(transfers, at_most);
  });
}

}  // namespace host_internal

template <class Driver>
const dflash_host_table* host_table_of() {
  static const dflash_host_table table = [] {
    dflash_host_table filled{};
    filled.struct_size = sizeof filled;
    filled.abi_version = DFLASH_HOST_ABI_VERSION;
    filled.name = Driver::kName;
    filled.version = internal::common_table().version;
    filled.open = [](uint32_t device, const dflash_open_options* options, dflash_host** opened, dflash_error* error) {
      return host_internal::answered(error, [&]() -> Status {
        if (opened == nullptr) return host_internal::missing("host");
        const dflash_open_options asked = read_record(options);
        auto runtime = Driver::open_for_host(device, OpenOptions{1, asked.seed});
        if (!runtime.ok()) return std::move(runtime).error();
        *opened = new dflash_host(std::move(runtime).value(), Driver::kDlpackType);
        return ok();
      });
    };
    filled.close = [](dflash_host* host) { delete host; };
    filled.info = &host_internal::info;
    filled.allocate_pinned = &host_internal::allocate_pinned;
    filled.release_pinned = [](dflash_host* host, void* memory) {
      if (host != nullptr) host->device.release_pinned(static_cast<std::byte*>(memory));
    };
    filled.copy_in = &host_internal::copy<true>;
    filled.copy_out = &host_internal::copy<false>;
    return filled;
  }();
  return &table;
}

}  // namespace dflash::plugin

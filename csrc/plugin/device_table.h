// The C table of a backend that is written in C++: `table_of<Driver>()`. A Driver names the backend
// and lists and opens its devices:
//
//   static constexpr const char* kName;
//   static Result<std::vector<DeviceListing>> list();   // error: why there can be none
//   static Result<std::unique_ptr<Device>> open(uint32_t device, const OpenOptions& options);
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "plugin/backend_abi.h"
#include "plugin/device.h"

namespace dflash::plugin {

namespace internal {
void answer_probe(const Result<std::vector<DeviceListing>>& listed, dflash_probe* found);
int32_t answer_info(const char* backend, const Result<std::vector<DeviceListing>>& listed,
                    uint32_t device, dflash_device_info* info, dflash_error* error);
using OpenDevice = Result<std::unique_ptr<Device>> (*)(uint32_t device, const OpenOptions& options);
int32_t answer_open(OpenDevice open, uint32_t device, const dflash_open_options* options,
                    dflash_device** opened, dflash_error* error);
// Everything but name and the three functions above.
dflash_backend_table common_table();
}  // namespace internal

template <class Driver>
const dflash_backend_table* table_of() {
  static const dflash_backend_table table = [] {
    dflash_backend_table filled = internal::common_table();
    filled.name = Driver::kName;
    filled.probe = [](dflash_probe* found) { internal::answer_probe(Driver::list(), found); };
    filled.device_info = [](uint32_t device, dflash_device_info* info, dflash_error* error) {
      return internal::answer_info(Driver::kName, Driver::list(), device, info, error);
    };
    filled.open = [](uint32_t device, const dflash_open_options* options, dflash_device** opened,
                     dflash_error* error) {
      return internal::answer_open(&Driver::open, device, options, opened, error);
    };
    return filled;
  }();
  return &table;
}

}  // namespace dflash::plugin

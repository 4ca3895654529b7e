// Finds backends: the core's own `cpu`, and the plug-ins libdflash_{cuda,hip,sim}.so that lie next
// to the core or in a folder that the caller knows. What keeps one from being used is a sentence,
// never a failure of the process. A plug-in, once opened, stays for the life of the process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "plugin/backend_abi.h"
#include "plugin/device.h"
#include "plugin/host_abi.h"

namespace dflash::plugin {

inline constexpr const char* kBackendNames[] = {"cpu", "cuda", "hip", "sim"};

// The folder that holds the core itself.
std::string own_directory();

// What `file`, a plug-in of backend `name`, exports under this name; null where it lacks that.
// Errors: kUnsupported where the file is missing or cannot be opened, with what to do.
Result<void*> find_exported(const std::string& name, const std::string& file,
                            const std::string& directory, const char* symbol);

// The table of a backend. Errors: kInvalidArgument for a name that is none of kBackendNames;
// kUnsupported where the plug-in's file is missing, cannot be opened, or was built for another
// core, each with what to do.
Result<const dflash_backend_table*> load_backend(const std::string& name,
                                                 const std::string& directory = own_directory());

// What a table must fulfil before anything in it is called. Errors: kUnsupported.
Status check_table(const dflash_backend_table* table, const std::string& name,
                   const std::string& file);

// The table of a plug-in for the host's device. Errors: as above; kUnsupported for `cpu`, which has
// none.
Result<const dflash_host_table*> load_host(const std::string& name,
                                           const std::string& directory = own_directory());
Status check_host_table(const dflash_host_table* table, const std::string& name,
                        const std::string& file);

// Every device of a backend, usable or not. Errors: kUnsupported with the backend's reason where it
// has none.
Result<std::vector<DeviceListing>> list_devices(const dflash_backend_table& table);

// The processor's own kernels behind the C table, as every other backend: what holds for one is
// tested on all. (A worker with backend `cpu` uses CpuBackend directly.)
const dflash_backend_table* cpu_table();

}  // namespace dflash::plugin

// SPDX-License-Identifier: Apache-2.0
#include "plugin/loader.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "plugin/abi_records.h"

namespace dflash::plugin {
namespace {

std::string build_hint(const std::string& name) {
  return name == "sim" ? "build it with `make core`" : "build it with `make plugins`";
}

std::string missing_hint(const std::string& name) {
  return name == "sim" ? build_hint(name)
                       : build_hint(name) + ", or install the package dflash-moe-" + name;
}

Error unsupported(const std::string& name, const std::string& reason) {
  return Error{ErrorCode::kUnsupported, "backend '" + name + "': " + reason};
}

// Every function of version 1, which is all a caller here uses.
bool is_complete(const dflash_backend_table& table) {
  return table.probe != nullptr && table.device_info != nullptr && table.open != nullptr &&
         table.close != nullptr && table.caps != nullptr && table.layer_bytes != nullptr &&
         table.layer_define != nullptr && table.layer_drop != nullptr &&
         table.layer_resident_bytes != nullptr && table.expert_load != nullptr &&
         table.submit != nullptr && table.wait != nullptr && table.selftest != nullptr;
}

std::string last_loader_error() {
  const char* text = ::dlerror();
  return text == nullptr ? "unknown error" : text;
}

std::string plugin_file(const std::string& name) { return "libdflash_" + name + ".so"; }

}  // namespace

std::string own_directory() {
  Dl_info found{};
  if (::dladdr(reinterpret_cast<const void*>(&own_directory), &found) == 0 ||
      found.dli_fname == nullptr)
    return ".";
  const std::string file = found.dli_fname;
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

Result<void*> find_exported(const std::string& name, const std::string& file,
                            const std::string& directory, const char* symbol) {
  const std::string path = directory + "/" + file;
  if (::access(path.c_str(), R_OK) != 0) {
    return unsupported(name, "plug-in " + file + " is not next to the core; " + missing_hint(name));
  }
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return unsupported(name, "plug-in " + file + " cannot be opened: " + last_loader_error());
  return ::dlsym(library, symbol);
}

Status check_table(const dflash_backend_table* table, const std::string& name,
                   const std::string& file) {
  if (table == nullptr)
    return unsupported(name, file + " has no backend table; " + build_hint(name) + " again");
  if (table->struct_size < sizeof(dflash_backend_table) ||
      table->abi_version != DFLASH_BACKEND_ABI_VERSION) {
    return unsupported(
        name, file + " was built for another core (table version " +
                  std::to_string(table->abi_version) + " of " + std::to_string(table->struct_size) +
                  " bytes, this core needs version " + std::to_string(DFLASH_BACKEND_ABI_VERSION) +
                  " of at least " + std::to_string(sizeof *table) + "); " + build_hint(name) +
                  " again");
  }
  if (table->name == nullptr || name != table->name || table->version == nullptr ||
      !is_complete(*table)) {
    return unsupported(name, file + " has an incomplete table or one of backend '" +
                                 (table->name == nullptr ? "" : table->name) + "'; " +
                                 build_hint(name) + " again");
  }
  // The same class name must mean the same bits: kernels of another release are not asked.
  if (std::strcmp(table->version, DFLASH_VERSION) != 0) {
    return unsupported(name, file + " is of version " + table->version +
                                 ", the core of " DFLASH_VERSION "; " + build_hint(name) +
                                 " again");
  }
  return ok();
}

Result<const dflash_backend_table*> load_backend(const std::string& name,
                                                 const std::string& directory) {
  if (std::find(std::begin(kBackendNames), std::end(kBackendNames), name) ==
      std::end(kBackendNames)) {
    return Error{ErrorCode::kInvalidArgument,
                 "backend '" + name + "' is not known; known are cpu, cuda, hip, sim"};
  }
  if (name == "cpu") return cpu_table();
  auto symbol = find_exported(name, plugin_file(name), directory, DFLASH_BACKEND_SYMBOL);
  if (!symbol.ok()) return std::move(symbol).error();
  const dflash_backend_table* table = nullptr;
  if (symbol.value() != nullptr) table = reinterpret_cast<dflash_backend_entry>(symbol.value())();
  DFLASH_TRY(check_table(table, name, plugin_file(name)));
  return table;
}

Status check_host_table(const dflash_host_table* table, const std::string& name,
                        const std::string& file) {
  if (table == nullptr || table->struct_size < sizeof *table ||
      table->abi_version != DFLASH_HOST_ABI_VERSION || table->name == nullptr ||
      name != table->name || table->version == nullptr ||
      std::strcmp(table->version, DFLASH_VERSION) != 0) {
    return unsupported(name, file + " has no table for a host's device, or that of another core; " +
                                 build_hint(name) + " again");
  }
  return ok();
}

Result<const dflash_host_table*> load_host(const std::string& name, const std::string& directory) {
  auto backend = load_backend(name, directory);  // its reasons are the more telling ones
  if (!backend.ok()) return std::move(backend).error();
  if (name == "cpu")
    return unsupported(name, "tensors of the processor need no device of the host");
  auto symbol = find_exported(name, plugin_file(name), directory, DFLASH_HOST_SYMBOL);
  if (!symbol.ok()) return std::move(symbol).error();
  const dflash_host_table* table = nullptr;
  if (symbol.value() != nullptr) table = reinterpret_cast<dflash_host_entry>(symbol.value())();
  DFLASH_TRY(check_host_table(table, name, plugin_file(name)));
  return table;
}

Result<std::vector<DeviceListing>> list_devices(const dflash_backend_table& table) {
  auto probe = new_record<dflash_probe>();
  table.probe(&probe);
  if (probe.num_devices == 0) return unsupported(table.name, text_of(probe.reason));
  std::vector<DeviceListing> devices;
  for (uint32_t device = 0; device < probe.num_devices; ++device) {
    auto info = new_record<dflash_device_info>();
    auto error = new_record<dflash_error>();
    if (const int32_t status = table.device_info(device, &info, &error); status != 0)
      return error_of(status, error);
    devices.push_back({text_of(info.name), text_of(info.vendor), text_of(info.arch),
                       info.memory_bytes, info.is_usable != 0 ? "" : text_of(info.reason)});
  }
  return devices;
}

}  // namespace dflash::plugin

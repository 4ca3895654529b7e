// Opens libssl and fills the table of its functions.
// SPDX-License-Identifier: Apache-2.0
#include "transport/secure/libssl.h"

#include <dlfcn.h>

namespace dflash::transport {
namespace {

constexpr unsigned long kMajor = 3;
// Majors that are or were on machines: they are named where the right one is missing.
constexpr const char* kOtherMajors[] = {"libssl.so.4", "libssl.so.1.1", "libssl.so.1.0.0"};

constexpr const char* kRemedy =
    "install OpenSSL 3 (Debian and Ubuntu: package libssl3; Fedora: openssl-libs), or set "
    "ipc.encryption: off at both ends, which leaves what travels readable on the network";

Error missing(const char* name) {
  std::string found;
  for (const char* other : kOtherMajors) {
    void* const handle = ::dlopen(other, RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) continue;
    ::dlclose(handle);
    found += std::string(found.empty() ? "" : ", ") + other;
  }
  return {ErrorCode::kUnsupported,
          std::string("encryption needs ") + name + ", which was not found" +
              (found.empty() ? "" : " (there is " + found + ", another major version, not used)") +
              "; " + kRemedy};
}

}  // namespace

Result<std::shared_ptr<const Libssl>> load_libssl(const char* name) {
  // Never unloaded: libssl registers its own clean-up at the end of the process.
  void* const handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) return missing(name);
  auto library = std::make_shared<Libssl>();
  const char* lacking = nullptr;
  // The functions of libcrypto are found as well, because libssl depends on it.
#define DFLASH_FIND(result, function, parameters)                                         \
  library->function = reinterpret_cast<result(*) parameters>(::dlsym(handle, #function)); \
  if (library->function == nullptr) lacking = #function;
  DFLASH_LIBSSL_FUNCTIONS(DFLASH_FIND)
#undef DFLASH_FIND
  if (lacking != nullptr) {
    return Error{ErrorCode::kUnsupported, std::string("encryption: ") + name + " has no function " +
                                              lacking + "; " + kRemedy};
  }
  if (const unsigned long major = library->OpenSSL_version_num() >> 28; major != kMajor) {
    return Error{ErrorCode::kUnsupported, std::string("encryption: ") + name + " is " +
                                              library->version() + ", another major version; " +
                                              kRemedy};
  }
  return std::shared_ptr<const Libssl>(std::move(library));
}

}  // namespace dflash::transport

// Opens libfabric and fills the table of its functions.
// SPDX-License-Identifier: Apache-2.0
#include "transport/fabric/libfabric.h"

#include <dlfcn.h>

#include <cerrno>

#include "base/kept_signal_handlers.h"

namespace dflash::transport {
namespace {

constexpr const char* kName = "libfabric.so.1";
constexpr const char* kRemedy =
    "install libfabric (Debian and Ubuntu: package libfabric1; Fedora: libfabric), or set "
    "ipc.transport: auto";

Result<Libfabric> load() {
  const KeptSignalHandlers handlers;
  // Never unloaded: its providers have threads and clean-up of their own.
  void* const handle = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* const reason = ::dlerror();
    return Error{ErrorCode::kUnsupported,
                 std::string("transport fabric needs ") + kName + ", which cannot be opened (" +
                     (reason == nullptr ? "no reason given" : reason) + "); " + kRemedy};
  }
  Libfabric library;
  const char* lacking = nullptr;
#define DFLASH_FIND(result, function, version, parameters)                                         \
  library.function = reinterpret_cast<result(*) parameters>(::dlvsym(handle, #function, version)); \
  if (library.function == nullptr) lacking = #function "@" version;
  DFLASH_LIBFABRIC_FUNCTIONS(DFLASH_FIND)
#undef DFLASH_FIND
  if (lacking != nullptr) {
    return Error{ErrorCode::kUnsupported, std::string("transport fabric: ") + kName +
                                              " has no function " + lacking + "; " + kRemedy};
  }
  return library;
}

}  // namespace

Error Libfabric::error(const std::string& what, int64_t returned) const {
  const int number = static_cast<int>(returned < 0 ? -returned : returned);
  std::string message = what + ": " + fi_strerror(number);
  if (number == ENOMEM) {
    // Memory that a device reads and writes by itself is locked, which has a limit of its own.
    return {ErrorCode::kOutOfMemory,
            message + "; where the device registers memory, `ulimit -l unlimited` lets it lock it"};
  }
  return {ErrorCode::kSystem, std::move(message)};
}

Result<const Libfabric*> load_libfabric() {
  static const Result<Libfabric> library = load();
  if (!library.ok()) return library.error();
  return &library.value();
}

}  // namespace dflash::transport

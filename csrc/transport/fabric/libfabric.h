// The functions of libfabric that fabrics use, found at run time: the package is built with
// libfabric's headers and runs on machines without the library, which are told so in words. All its
// other functions are members of objects that these return (fi_*(3)).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <rdma/fabric.h>

#include <cstdint>
#include <string>

#include "base/result.h"

namespace dflash::transport {

// One row per function: result, name, the version of its binary interface, parameters. Asked for by
// version, a later library answers with the layouts of the headers that this was compiled with.
#define DFLASH_LIBFABRIC_FUNCTIONS(X)                                                     \
  X(int, fi_getinfo, "FABRIC_1.3",                                                        \
    (uint32_t version, const char* node, const char* service, uint64_t flags,             \
     const fi_info* hints, fi_info** infos))                                              \
  X(void, fi_freeinfo, "FABRIC_1.3", (fi_info*))                                          \
  X(fi_info*, fi_dupinfo, "FABRIC_1.3", (const fi_info*))                                 \
  X(int, fi_fabric, "FABRIC_1.1", (fi_fabric_attr*, fid_fabric * *fabric, void* context)) \
  X(const char*, fi_strerror, "FABRIC_1.0", (int error_number))                           \
  X(uint32_t, fi_version, "FABRIC_1.0", (void))

struct Libfabric {
#define DFLASH_DECLARE(result, name, version, parameters) result(*name) parameters = nullptr;
  DFLASH_LIBFABRIC_FUNCTIONS(DFLASH_DECLARE)
#undef DFLASH_DECLARE

  // Makes an Error of what a function of libfabric returned, in the words of `system_error`.
  Error error(const std::string& what, int64_t returned) const;
};

// Opens the library once a process; it stays there. Any thread. Errors: kUnsupported naming the
// package to install.
Result<const Libfabric*> load_libfabric();

}  // namespace dflash::transport

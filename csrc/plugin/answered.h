// How the functions behind a C table answer: a Status becomes its number and a sentence.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>

#include "plugin/abi_records.h"

namespace dflash::plugin {

// Runs `body` (Status()); whatever it cannot allocate becomes an error, since nothing may be thrown
// through the table.
template <class Body>
int32_t answered(dflash_error* error, Body&& body) {
  try {
    const Status done = body();
    return done.ok() ? 0 : report(done.error(), error);
  } catch (const std::bad_alloc&) {
    return report(
        Error{ErrorCode::kOutOfMemory, "the plug-in could not allocate memory of the host"}, error);
  }
}

// A pointer that a caller has to give. `what`: the table, and the argument.
inline Error missing(const char* what) {
  return Error{ErrorCode::kInvalidArgument, std::string(what) + " is null"};
}

}  // namespace dflash::plugin

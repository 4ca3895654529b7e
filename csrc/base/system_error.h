// A failed system call as an Error, in one voice: what was being done, the system's own words, and
// the remedy where the reason is a limit of this process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <string>

#include "base/result.h"

namespace dflash {

// kOutOfMemory for a lack of memory, else kSystem.
Error system_error(const std::string& what, int error_number = errno);

}  // namespace dflash

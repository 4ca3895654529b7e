// Makes an Error of a failed system call, always in the same words: what was being done, the
// system's own text, and the remedy where the reason is a limit of this process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <string>

#include "base/result.h"

namespace dflash {

// The code is kOutOfMemory for a lack of memory or space, otherwise kSystem. Any thread.
Error system_error(const std::string& what, int error_number = errno);

}  // namespace dflash

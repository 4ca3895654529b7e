// Where a program finds its supervisor: two environment variables, which `dflash-moe llama` sets.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>

#include "base/result.h"
#include "wire/handover_messages.h"

namespace dflash::c_interface {

inline constexpr const char* kPathVariable = "DFLASH_MOE_HANDOVER";
inline constexpr const char* kTokenVariable = "DFLASH_MOE_HANDOVER_TOKEN_FD";

// The path of the supervisor's socket, and the token that proves that this process was meant.
struct Supervisor {
  std::string path;
  std::array<std::byte, wire::kHandoverTokenBytes> token{};
};

// Reads both variables, and the token out of the pipe that the second one numbers, once: the pipe
// is closed, so that no program started from here inherits it. `path`, where it is not null, stands
// in for the first variable; without the second one the token is then all zeros. Errors:
// kInvalidArgument naming the variable, kTimeout where the pipe stays empty.
Result<Supervisor> find_supervisor(const char* path);

}  // namespace dflash::c_interface

// The processor's own kernels behind the C table, as every other backend: what holds for one is
// tested on all. (A worker with backend `cpu` uses CpuBackend directly.)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "plugin/backend_abi.h"

namespace dflash::plugin {

const dflash_backend_table* cpu_table();

}  // namespace dflash::plugin

// The compute threads of a host's operators as Python holds them. Operators keep the pool alive.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "compute/cpu/instruction_sets.h"
#include "compute/cpu/thread_pool.h"

namespace dflash::bindings {

struct HostPoolBox {
  std::shared_ptr<compute::ThreadPool> pool;
  compute::Isa isa;  // whose kernels the operators take; never the reference
};

}  // namespace dflash::bindings

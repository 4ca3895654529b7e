// The simulator's side of a doorbell: the kernel compiled for the CPU, and a queue whose operations
// on words are carried out by wait().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "cards/sim/sim_runtime.h"
#include "measure/bells/queue_words.h"

namespace dflash::measure {

compute::gpu::sim::Module bell_module();
// `runtime` must outlive the words.
std::unique_ptr<QueueWords> simulated_queue_words(compute::gpu::SimulatedRuntime& runtime);

}  // namespace dflash::measure

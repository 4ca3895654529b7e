// The bells of the simulated cards. A wait yields the processor, since the peer may need it.
// SPDX-License-Identifier: Apache-2.0
#define DFLASH_GPU_SIM 1
#include "measure/bells/sim_bells.h"

#include <sched.h>

#include <atomic>

#include "measure/bells/bell_kernels.h"
#include "measure/bells/ring_bells.h"

namespace dflash::measure {
namespace {

constexpr compute::gpu::sim::Kernel kFunctions[] = {
    &compute::gpu::sim::call<BellParams, &dflash_ring_bells>};

class SimulatedQueueWords final : public QueueWords {
 public:
  explicit SimulatedQueueWords(compute::gpu::SimulatedRuntime& runtime) : runtime_(runtime) {}

  Status write(uint32_t* word, uint32_t value) override {
    return runtime_.queue([word, value] {
      std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
      return true;
    });
  }
  Status await(const uint32_t* word, uint32_t value) override {
    return runtime_.queue([word = const_cast<uint32_t*>(word), value] {
      const uint32_t found = std::atomic_ref<uint32_t>(*word).load(std::memory_order_acquire);
      if (static_cast<int32_t>(found - value) >= 0) return true;
      ::sched_yield();
      return false;
    });
  }
  Status call_host(void (*function)(void*), void* argument) override {
    return runtime_.queue([function, argument] {
      function(argument);
      return true;
    });
  }

 private:
  compute::gpu::SimulatedRuntime& runtime_;
};

}  // namespace

compute::gpu::sim::Module bell_module() { return {kBellKernels, kFunctions}; }

std::unique_ptr<QueueWords> simulated_queue_words(compute::gpu::SimulatedRuntime& runtime) {
  return std::make_unique<SimulatedQueueWords>(runtime);
}

}  // namespace dflash::measure

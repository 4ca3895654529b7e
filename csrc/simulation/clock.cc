// The functions of base/clock.h in virtual time. Outside of a simulation they are the machine's, so
// that whoever sets one up may use anything.
// SPDX-License-Identifier: Apache-2.0
#include "base/clock.h"

#include <time.h>

#include "simulation/scheduler.h"

namespace dflash {

int64_t now_ns() {
  if (simulation::Scheduler::is_running()) return simulation::Scheduler::current().now_ns();
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Simulated threads never share a core.
int64_t thread_cpu_ns() { return now_ns(); }

void nap_ns(int64_t nanoseconds) {
  const simulation::Scheduler& scheduler = simulation::Scheduler::current();
  scheduler.running()->sleep_until(scheduler.now_ns() + nanoseconds);
}

}  // namespace dflash

// The waits of the machine, in a file of their own so that a linker which has found others
// (simulation/virtual_time.cc) takes none of these.
// SPDX-License-Identifier: Apache-2.0
#include "base/timed_wait.h"

#include <chrono>

namespace dflash {

void wait_for_ns(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                 int64_t nanoseconds) {
  condition.wait_for(lock, std::chrono::nanoseconds(nanoseconds));
}

void notify_waiter(std::condition_variable& condition) { condition.notify_one(); }

}  // namespace dflash

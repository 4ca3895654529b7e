// Answers bells by polling, as a worker that spins would.
// SPDX-License-Identifier: Apache-2.0
#include "measure/bell_echo.h"

#include <sched.h>

#include <atomic>

#include "base/clock.h"

namespace dflash::measure {
namespace {

// Polls between two looks at the clock. At each look the core is offered to others, for machines
// that have few.
constexpr uint32_t kPollsPerLook = 1024;

}  // namespace

std::vector<int64_t> answer_bells(const BellEcho& echo) {
  const Deadline deadline = Deadline::after_ns(echo.timeout_ns);
  const std::atomic_ref<uint32_t> ring(*echo.ring), answer(*echo.answer);
  std::vector<int64_t> seen;
  seen.reserve(echo.num_rounds);
  for (uint32_t polls = 1; seen.size() < echo.num_rounds; ++polls) {
    const uint32_t expected = echo.first + static_cast<uint32_t>(seen.size());
    if (ring.load(std::memory_order_acquire) == expected) {
      answer.store(expected, std::memory_order_release);
      seen.push_back(now_ns());
    } else if (polls % kPollsPerLook == 0) {
      if (deadline.has_passed()) break;
      ::sched_yield();
    }
  }
  return seen;
}

}  // namespace dflash::measure

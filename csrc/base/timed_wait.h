// Waiting for another thread of the same process, by the clock of base/clock.h: a program that
// simulates time links definitions of its own instead, as it does for that clock, because a thread
// that really slept there would stop all of its fibres.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace dflash {

// Gives `lock` up until somebody notifies `condition`, for so long at most, or less for no reason.
// One thread at a time waits on a condition.
void wait_for_ns(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                 int64_t nanoseconds);
// Wakes whoever waits on `condition`. The mutex may be held.
void notify_waiter(std::condition_variable& condition);

}  // namespace dflash

// The clocks of the machine. A program that simulates time links definitions of its own instead
// (simulation/virtual_time.cc); everything else is the same object code.
// SPDX-License-Identifier: Apache-2.0
#include "base/clock.h"

#include <time.h>

namespace dflash {
namespace {

int64_t read_ns(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

int64_t now_ns() { return read_ns(CLOCK_MONOTONIC); }

int64_t thread_cpu_ns() { return read_ns(CLOCK_THREAD_CPUTIME_ID); }

void nap_ns(int64_t nanoseconds) {
  const timespec span{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  ::nanosleep(&span, nullptr);
}

}  // namespace dflash

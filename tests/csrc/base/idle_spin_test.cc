// How long an idle thread spins is learned from its pauses.
// SPDX-License-Identifier: Apache-2.0
#include "base/idle_spin.h"

#include <doctest/doctest.h>

namespace dflash {
namespace {

constexpr int64_t kUs = 1'000;

TEST_CASE("idle spin: it covers the pause between two layers, and keeps it over one long pause") {
  IdleSpin idle(50 * kUs);
  CHECK(idle.budget_ns() == 50 * kUs);
  idle.came_after(250 * kUs);
  CHECK(idle.budget_ns() == 1'000 * kUs);
  idle.came_after(2'500 * kUs);  // between two tokens
  CHECK(idle.budget_ns() >= 250 * kUs);
  idle.came_after(3 * kUs);
  CHECK(idle.budget_ns() == 50 * kUs);
}

TEST_CASE("idle spin: long pauses take it back to the least") {
  IdleSpin idle(50 * kUs);
  idle.came_after(900 * kUs);
  for (int i = 0; i < 10; ++i) idle.came_after(10'000'000 * kUs);
  CHECK(idle.budget_ns() == 50 * kUs);
}

TEST_CASE("idle spin: whoever may not spin never does") {
  IdleSpin idle(0);
  for (int64_t pause_ns : {int64_t{0}, int64_t{1}, 10 * kUs, 10'000'000 * kUs}) {
    idle.came_after(pause_ns);
    CHECK(idle.budget_ns() == 0);
  }
}

}  // namespace
}  // namespace dflash

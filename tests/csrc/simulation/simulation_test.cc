// Whole simulations: seeds keep every rule, and depend on nothing but the seed.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/simulation.h"

#include <doctest/doctest.h>

#include <array>
#include <string>

#include "simulation/retrying_members.h"

namespace dflash::simulation {
namespace {

constexpr int64_t kS = 1'000'000'000;

TEST_CASE("twenty seeds run twice have the same events") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Report first = simulate(seed, 5 * kS, make_retrying),
                 second = simulate(seed, 5 * kS, make_retrying);
    CHECK(first.event_hash == second.event_hash);
    CHECK(first.num_events == second.num_events);
    CHECK(first.last_events == second.last_events);
  }
}

TEST_CASE("seeds differ") {
  CHECK(simulate(1, kS, make_retrying).event_hash != simulate(2, kS, make_retrying).event_hash);
}

TEST_CASE("sixty seeds break every kind of thing, and no rule") {
  std::array<uint64_t, kNumSimulatedFaults> faults{};
  uint64_t succeeded = 0;
  for (uint64_t seed = 100; seed < 160; ++seed) {
    const Report report = simulate(seed, 10 * kS, make_retrying);
    for (const std::string& violation : report.violations)
      FAIL_CHECK("seed " << seed << ": " << violation);
    for (size_t kind = 0; kind < kNumSimulatedFaults; ++kind) faults[kind] += report.faults[kind];
    succeeded += report.calls.succeeded;
  }
  for (size_t kind = 0; kind < kNumSimulatedFaults; ++kind) {
    INFO("kind ", std::string(fault_name(static_cast<SimulatedFault>(kind))));
    CHECK(faults[kind] > 0);
  }
  CHECK(succeeded > 10'000);
}

TEST_CASE("the report names what the seed drew, and the last events") {
  const Report report = simulate(3, kS, make_retrying);
  REQUIRE(!report.options.empty());
  CHECK(report.options.back().starts_with("faults:"));
  CHECK(!report.last_events.empty());
  CHECK(report.last_events.size() <= 200);
}

}  // namespace
}  // namespace dflash::simulation

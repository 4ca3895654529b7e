// Whole simulations: seeds keep every rule, and depend on nothing but the seed.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/simulation.h"

#include <doctest/doctest.h>

#include <array>
#include <string>

#include "simulation/retrying_members.h"
#include "simulation/world.h"

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
  uint64_t succeeded = 0, shared_batches = 0;
  uint32_t with_two_hosts = 0;
  for (uint64_t seed = 100; seed < 160; ++seed) {
    const Report report = simulate(seed, 10 * kS, make_retrying);
    for (const std::string& violation : report.violations)
      FAIL_CHECK("seed " << seed << ": " << violation);
    for (size_t kind = 0; kind < kNumSimulatedFaults; ++kind) faults[kind] += report.faults[kind];
    succeeded += report.calls.succeeded;
    with_two_hosts += report.num_hosts == 2 ? 1 : 0;
    shared_batches += report.batches.sessions - report.batches.batches;
  }
  for (size_t kind = 0; kind < kNumSimulatedFaults; ++kind) {
    INFO("kind ", std::string(fault_name(static_cast<SimulatedFault>(kind))));
    CHECK(faults[kind] > 0);
  }
  CHECK(succeeded > 10'000);
  CHECK(with_two_hosts > 15);
  CHECK(shared_batches > 100);
}

Options with_two_hosts() {
  for (uint64_t seed = 1;; ++seed) {
    if (Options drawn = Options::of(seed, kS); drawn.hosts.size() == 2) return drawn;
  }
}

TEST_CASE("what befalls a process concerns both hosts, and what befalls one host the other never") {
  for (size_t kind = 0; kind < kNumSimulatedFaults; ++kind) {
    const auto fault = static_cast<SimulatedFault>(kind);
    CAPTURE(std::string(fault_name(fault)));
    World world(1, with_two_hosts());
    for (uint32_t host = 0; host < 2; ++host) world.set_attached(host, 0, true);
    world.begin_fault(1, 0, fault, kS);
    const auto is_healthy = [&world](uint32_t host) {
      return world.hosts[host].workers[0].healthy_since_ns <= world.scheduler.now_ns();
    };
    CHECK(!is_healthy(1));
    CHECK(is_healthy(0) == !is_of_process(fault));
  }
}

TEST_CASE("two hosts have no worker that one of them starts, and no copy of their own") {
  const Options options = with_two_hosts();
  for (const SimulatedWorkerOptions& worker : options.workers)
    CHECK((!worker.is_started_by_host && !worker.is_last_resort));
  for (const SimulatedFault kind : options.hosts.back().faults) CHECK(!is_of_process(kind));
  CHECK(options.hosts.back().networks.size() == options.workers.size());
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

// One simulation: a host or two and their workers, the real client and the real worker loop, for
// some virtual time in which things break and some in which everything must heal. A run depends on
// its seed alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "simulation/caller.h"
#include "simulation/faults.h"
#include "simulation/membership.h"
#include "simulation/options.h"
#include "store/compute_turns.h"

namespace dflash::simulation {

struct Report {
  uint64_t event_hash = 0;  // equal for every run of the seed with the same code
  uint64_t num_events = 0;
  int64_t virtual_ns = 0;
  uint32_t num_hosts = 0;
  store::BatchCounts batches;  // of all workers
  CallCounts calls;
  std::array<uint64_t, kNumSimulatedFaults> faults{};
  std::vector<std::string> violations;  // empty where every rule was kept
  std::vector<std::string> options;     // what the seed drew, a line each
  // At most 200, oldest first: those before the first violation, or before the end.
  std::vector<std::string> last_events;
};

// Things break for `duration_ns`. Any thread; each runs simulations of its own. `make_membership`
// is called once for each process of a host, and what it makes by this thread alone.
Report simulate(uint64_t seed, int64_t duration_ns, const MakeMembership& make_membership);

}  // namespace dflash::simulation

// The ring of the last events and their wording.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/journal.h"

#include <algorithm>
#include <cstdio>

#include "base/error_code.h"
#include "simulation/faults.h"
#include "simulation/membership.h"

namespace dflash::simulation {
namespace {

// How an event's numbers a, b and c are worded, by JournalEvent.
constexpr const char* kWordings[] = {
    "call %llu is submitted, %llu tokens",
    "call %llu has its output after %llu us",
    "call %llu fails, error %llu",
    "call %llu is abandoned",
    "worker %llu's path: slot %llu is published, %llu bytes",
    "worker %llu's path: slot %llu comes, %llu bytes",
    "worker %llu's path: slot %llu is damaged",
    "worker %llu",
    "worker %llu",
    "worker %llu: the session of generation %llu ends, error %llu",
    "worker %llu is attached, generation %llu",
    "worker %llu is found lost",
    "worker %llu: its data path is retired",
    "worker %llu, attempt %llu",
    "nothing is broken any more",
    "A RULE IS BROKEN",
};

}  // namespace

void Journal::record(int64_t now_ns, JournalEvent kind, uint64_t a, uint64_t b, uint64_t c) {
  last_[num_events_++ % kKept] = {now_ns, kind, a, b, c};
  for (const uint64_t word : {static_cast<uint64_t>(now_ns), static_cast<uint64_t>(kind), a, b, c})
    mix(word);
}

std::vector<std::string> Journal::last_events() const {
  std::vector<std::string> lines;
  const uint64_t first = num_events_ - std::min<uint64_t>(num_events_, kKept);
  for (uint64_t i = first; i < num_events_; ++i) {
    const Entry& entry = last_[i % kKept];
    char text[160];
    int length =
        std::snprintf(text, sizeof text, "%13.6f s  ", static_cast<double>(entry.now_ns) * 1e-9);
    length += std::snprintf(text + length, sizeof text - static_cast<size_t>(length),
                            kWordings[static_cast<size_t>(entry.kind)], entry.a, entry.b, entry.c);
    std::string line(text, static_cast<size_t>(length));
    if (entry.kind == JournalEvent::kFault) {
      line += std::string(": ") + fault_name(static_cast<SimulatedFault>(entry.b)) + " for " +
              std::to_string(entry.c) + " ms";
    } else if (entry.kind == JournalEvent::kHeal) {
      line += std::string(": ") + fault_name(static_cast<SimulatedFault>(entry.b)) + " is over";
    } else if (entry.kind == JournalEvent::kMember) {
      line += std::string(": ") + happening_name(static_cast<Happening>(entry.c));
    } else if (entry.kind == JournalEvent::kDamage) {
      line += std::string(": ") + fault_name(static_cast<SimulatedFault>(entry.c));
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace dflash::simulation

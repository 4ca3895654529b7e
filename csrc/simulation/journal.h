// What happened in a simulation: a hash over all of it, by which two runs of one seed are compared,
// and the last events in full, for whoever replays a seed that failed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace dflash::simulation {

enum class JournalEvent : uint8_t {
  kSubmit,      // a call was submitted: call, tokens
  kSucceed,     // ... and has its output: call, microseconds
  kFail,        // ... or an error: call, error code
  kAbandon,     // the host gave a call up: call
  kPublish,     // an end of a data path published a slot: worker, slot, bytes
  kDeliver,     // the message came to the other end: worker, slot, bytes
  kDamage,      // a message was damaged on its way: worker, slot, kind of damage
  kFault,       // something was broken: worker, kind of fault, milliseconds
  kHeal,        // ... and works again: worker, kind of fault
  kSessionEnd,  // a worker's session ended: worker, generation, error code
  kAttach,      // the host has a data path to a worker: worker, generation
  kLost,        // the host has noticed that a worker is lost: worker
  kRetire,      // the host renews a worn data path: worker
  kMember,      // a worker's state machine was told something: worker, attempt, what
  kPhase,       // from here on nothing is broken any more
  kViolation,   // something happened that must not
};

class Journal {
 public:
  void record(int64_t now_ns, JournalEvent kind, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0);
  uint64_t hash() const { return hash_; }
  uint64_t num_events() const { return num_events_; }
  // The last events as text, oldest first, one a line.
  std::vector<std::string> last_events() const;

 private:
  struct Entry {
    int64_t now_ns;
    JournalEvent kind;
    uint64_t a, b, c;
  };
  static constexpr size_t kKept = 200;

  void mix(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3; }

  std::array<Entry, kKept> last_{};
  uint64_t num_events_ = 0;
  uint64_t hash_ = 0xcbf29ce484222325;  // FNV-1a over words
};

}  // namespace dflash::simulation

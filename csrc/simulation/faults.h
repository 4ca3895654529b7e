// What a simulation breaks, by name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::simulation {

enum class SimulatedFault : uint8_t {
  // -- of a worker's process --
  kKill,         // as by SIGKILL; it is started again after a while
  kFreeze,       // as by SIGSTOP, then SIGCONT: afterwards it writes what nobody waits for any more
  kHang,         // it stands still until it is ended; one that the host did not start goes on later
  kSlow,         // it computes 2 to 1,000 times as long
  kLosePulses,   // its pulses do not arrive, everything else does
  kRefuse,       // it answers the next request with an error that is not about the numbers
  kRefuseRange,  // ... or with one that is
  kCrashLoop,    // it is killed, and for a while dies whenever it is started
  kUnfit,        // what it loads next is not what it held before
  kMute,         // its answers do not come, everything else does, until it is started again; one
                 // that the host did not start answers again later, on fresh paths
  // -- of the network between host and worker --
  kCutOff,       // nothing passes in either direction
  kCutToWorker,  // nothing passes from the host to the worker
  kCutToHost,    // nothing passes from the worker to the host
  kDelay,        // everything takes 1 to 500 ms longer
  // -- of one message --
  kFlipBit,
  kTruncate,
  kHalf,             // half of it comes, then the connection closes (a socket), or it is truncated
  kStuck,            // half of it comes (a socket), or none, and then nothing more on its path
  kDuplicate,        // it comes twice
  kStaleGeneration,  // it names a former generation of the path
  kOtherAttempt,     // it names another attempt
  kOtherSlot,        // it comes in another slot
  kLyingTimes,       // a reply's times are nonsense; its rows are right
  // -- of the host --
  kAbandon,  // it gives a call up
  kRemove,   // it removes a worker, which drains, and adds it again later
  kBusy,     // it computes something else, and nobody looks at what arrives
  kStop,     // its process is stopped, maybe with the workers that it has started
  // -- of a host that shares its workers --
  kFlood,  // it makes many calls at a time, without a pause
  kDie,    // as by SIGKILL; another one takes its place after a while
};
inline constexpr size_t kNumSimulatedFaults = static_cast<size_t>(SimulatedFault::kDie) + 1;

// Whether all hosts of a worker have to do with it. Everything else is one host's own affair, and
// must cost the others nothing.
constexpr bool is_of_process(SimulatedFault kind) { return kind < SimulatedFault::kMute; }

constexpr const char* fault_name(SimulatedFault kind) {
  constexpr const char* kNames[kNumSimulatedFaults] = {
      "kill",          "freeze",        "hang",        "slow",      "lose_pulses",
      "refuse",        "refuse_range",  "crash_loop",  "unfit",     "mute",
      "cut_off",       "cut_to_worker", "cut_to_host", "delay",     "flip_bit",
      "truncate",      "half",          "stuck",       "duplicate", "stale_generation",
      "other_attempt", "other_slot",    "lying_times", "abandon",   "remove",
      "busy",          "stop",          "flood",       "die",
  };
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace dflash::simulation

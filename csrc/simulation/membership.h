// What decides when a worker that is lost is started again, dialled again or left alone. It is the
// product's own state machine (dflash_moe/holders/membership.py), which has no clock and no I/O;
// here are only the words in which events and orders pass between it and the simulation.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace dflash::simulation {

struct Options;

// What can happen to a worker, by the names of dflash_moe/holders/membership.py.
enum class Happening : uint8_t {
  kAdded,
  kStarted,
  kJoined,
  kFailed,
  kUnfit,
  kLost,
  kEnded,
  kDue,
  kReleased,
  kRemoved,
  kDrained,
};
constexpr const char* happening_name(Happening what) {
  constexpr const char* kNames[] = {"added", "started", "joined",   "failed",  "unfit",  "lost",
                                    "ended", "due",     "released", "removed", "drained"};
  return kNames[static_cast<size_t>(what)];
}

struct MemberEvent {
  uint32_t worker = 0;
  Happening what = Happening::kAdded;
  uint64_t attempt = 0;
  const char* reason = "";
  bool is_death = true;  // of a failure: whether the worker died
};

// One order, by its name there: "start", "join", "end", "wait" or "drain".
struct MemberOrder {
  std::string task;
  uint64_t attempt = 0;
  int64_t until_ns = 0;  // of "wait"
};

// What is to be done for a worker, and how it stands now.
struct MemberDecision {
  std::vector<MemberOrder> orders;
  std::string state;
  bool is_coming = false;  // whether somebody works at it that it serves again, or it does
  uint64_t attempt = 0;
};

// Called by one thread at a time, never on the stack of a simulated thread: an interpreter looks at
// the bounds of its stack.
class Membership {
 public:
  virtual ~Membership() = default;
  virtual MemberDecision on(const MemberEvent& event, int64_t now_ns) = 0;
};

using MakeMembership =
    std::function<std::unique_ptr<Membership>(uint64_t seed, const Options& options)>;

}  // namespace dflash::simulation

// Which holder of a shard gets a slice, and when a second one is asked as well. Everything here is
// a choice; the engine acts on it.
//
// Remedies come in an order: a holder that is well, one that is late or suspected to hang, the last
// resort (the host's own copy), one that drains, one that answers nothing. Among equals, the one
// whose backlog is predicted to end first; among idle ones, the first in the list, so that without
// faults nothing changes place.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "client/link.h"

namespace dflash::client {

// Returns the holder that should get a slice, or null where none can now. `refused_by` and `except`
// are left out.
Link* pick_holder(std::span<const uint32_t> holders, Links links,
                  std::span<const uint32_t> refused_by = {}, const Link* except = nullptr);

// Returns a holder that must answer something before it is trusted again and can be asked now, or
// null. A call asks it first, and others soon if no answer comes (Remedies::relieve).
Link* find_on_trial(std::span<const uint32_t> holders, Links links);

// What can be expected of the holders of a shard that have not refused, from the best to the worst.
enum class Outlook : uint8_t {
  kUsable,      // one of them can be asked now
  kPathBusy,    // none now, but a data path is being renewed, or lent to a device step
  kComingBack,  // all are lost, and somebody brings one of them back
  kGone,        // all are lost for good, or have refused
};
// `grace_ns`: for so long after its loss, a holder that is brought back is preferred to the last
// resort.
Outlook outlook_of(std::span<const uint32_t> holders, Links links, int64_t now, int64_t grace_ns,
                   std::span<const uint32_t> refused_by = {});
// Names everybody who held a shard of the layer and is lost, and how; one of them at least is.
Error lost_shard_error(const Layer& layer, std::span<const uint32_t> holders, Links links);

// An attempt is not late before this time has passed, or three times what was predicted for it and
// all that was before it: shorter waits are those of a busy machine.
inline constexpr int64_t kLeastPatienceNs = 2'000'000;
inline constexpr int64_t kLatePatience = 3;

// When somebody looks next whether an attempt is late. Nobody does before a shard has got several
// holders, because there is nobody else to ask.
class LateWatch {
 public:
  void begin() { is_on_ = true; }
  bool is_on() const { return is_on_; }
  void look_by(int64_t when) { next_ns_ = std::min(next_ns_, when); }
  void look_at_once() { next_ns_ = 0; }
  // Somebody looks now, and says by when to look again.
  void clear() { next_ns_ = kNever; }
  bool is_due(int64_t now) const { return is_on_ && now >= next_ns_; }
  int64_t next_ns() const { return is_on_ ? next_ns_ : kNever; }

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  bool is_on_ = false;
  int64_t next_ns_ = kNever;  // by the watch clock
};

// Bounds the second requests for slices that are merely slow: it starts full, every slice that
// arrives adds a share of a token, and every such request takes one.
class HedgeBudget {
 public:
  explicit HedgeBudget(double share) : share_(share), tokens_(share > 0 ? kMost : 0) {}
  void earn() {
    tokens_ += share_;
    if (tokens_ > kMost) tokens_ = kMost;
  }
  bool spend() {
    if (tokens_ < 1) return false;
    tokens_ -= 1;
    return true;
  }

 private:
  static constexpr double kMost = 10;
  double share_;
  double tokens_;
};

}  // namespace dflash::client

// The client's half of device steps. A step is lent the data paths of the workers that it asks, one
// holder for each shard, and the host's device publishes requests and takes replies there by
// itself. Whoever has the turn (turn.h) calls these.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "client/call.h"
#include "client/link.h"
#include "client/types.h"

namespace dflash::client {

// Who would answer a step that begins now.
struct StepChoice {
  std::vector<uint32_t> workers;     // those that are asked, in ascending index
  std::vector<StepHolders> holders;  // of every layer; its paths are places in `workers`
  // Why there is no step: kUnsupported naming a worker whose transport has no ring or whose slots
  // are too few, kWorkerLost naming all holders of a shard, kInvalidArgument where something is
  // under way.
  std::optional<Error> error;
  bool is_busy = false;  // the error goes by itself: a path is being renewed, or a reply is owed
};
// Chooses as the router does for plain calls, among holders whose paths a device can use: the first
// of the best for each shard. A worker that nobody chooses does not matter, lost or not.
StepChoice choose_step_holders(Links links, const std::map<uint32_t, Layer>& layers);

// One path of the step that is open.
struct StepPath {
  uint32_t worker = 0;
  uint64_t generation = 0;  // of the path that was lent; the worker may have been lost since
};
class OpenStep {
 public:
  // Hands the chosen paths over.
  StepLease begin(Links links, StepChoice choice, int64_t now);
  // Takes the paths back, those that are not lost meanwhile, and books what was answered on them.
  void end(Links links, const std::map<uint32_t, Layer>& layers, const StepResult& result,
           int64_t now);
  std::span<const StepPath> paths() const { return paths_; }
  // Whether the path is lent to the step and its worker was not lost since.
  bool has(const Link& link, const StepPath& path) const {
    return link.path.state() == PathState::kLeased && link.path.generation() == path.generation;
  }
  // Whether for every shard that the step asks of `link` there is another holder to ask.
  bool has_stand_in(const Link& link, Links links, const std::map<uint32_t, Layer>& layers) const;

 private:
  std::vector<StepPath> paths_;       // empty where no step is open
  std::vector<StepHolders> holders_;  // of the latest step
  uint64_t holders_id_ = 0;
};

}  // namespace dflash::client

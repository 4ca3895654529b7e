// Hands all data paths over to a device step and takes them back.
// SPDX-License-Identifier: Apache-2.0
#include "client/step.h"

#include "wire/payload.h"

namespace dflash::client {

Status check_paths_for_step(Links links) {
  for (const auto& link : links) {
    if (link->path.is_lost()) {
      return Error{ErrorCode::kWorkerLost,
                   "worker " + link->name + " was lost: " + link->path.reason()}
          .at({link->name, {}, {}, {}});
    }
    if (link->path.state() == PathState::kLeased || link->path.state() == PathState::kWorn) {
      return Error{ErrorCode::kInvalidArgument, "the data path of worker " + link->name + " is " +
                                                    path_state_name(link->path.state()) +
                                                    "; a device step needs a usable one"}
          .at({link->name, {}, {}, {}});
    }
    if (link->path.is_listening() || !link->waiting.empty()) {
      return Error{ErrorCode::kInvalidArgument,
                   "worker " + link->name +
                       " still owes replies; a device step begins when all calls are done"}
          .at({link->name, {}, {}, {}});
    }
    if (!link->path.channel()->ring()) {
      return Error{ErrorCode::kUnsupported,
                   "worker " + link->name + " is reached by " + link->path.channel()->kind() +
                       "; device steps need shared memory: call experts() outside of a step"}
          .at({link->name, {}, {}, {}});
    }
  }
  return ok();
}

std::vector<LeasedPath> lease_paths(Links links, int64_t now) {
  std::vector<LeasedPath> leased;
  for (uint32_t index = 0; index < links.size(); ++index) {
    Link& link = *links[index];
    leased.push_back({index, link.name, link.path.generation(), link.path.geometry(),
                      link.request_dtype, link.reply_dtype, *link.path.channel()->ring()});
    link.path.lease();
    link.liveness.begin_to_owe(now);
  }
  return leased;
}

void return_paths(Links links, const std::map<uint32_t, Layer>& layers, const StepResult& result) {
  size_t index = 0;
  for (const auto& link : links) {
    if (link->path.state() != PathState::kLeased && !link->path.is_lost()) continue;
    link->path.end_lease(index < result.used.size() ? &result.used[index] : nullptr,
                         result.has_failed);
    ++index;
  }
  for (const StepMessage& message : result.answered) {
    if (message.worker >= links.size()) continue;
    const Link& link = *links[message.worker];
    Counters& counters = links[message.worker]->counters[message.layer];
    ++counters.calls;
    counters.rows += message.num_rows;
    counters.pairs += message.num_pairs;
    counters.request_bytes += message.request_bytes;
    counters.reply_bytes += message.reply_bytes;
    const auto layer = layers.find(message.layer);
    if (layer == layers.end()) continue;
    const LayerPlan& plan = layer->second.plan;
    counters.floor_bytes += wire::floor_bytes(message.num_rows, message.num_pairs, plan.in_size,
                                              link.request_dtype, plan.out_size, link.reply_dtype);
  }
}

}  // namespace dflash::client

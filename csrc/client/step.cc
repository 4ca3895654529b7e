// Chooses who answers a device step, hands the data paths over and takes them back.
// SPDX-License-Identifier: Apache-2.0
#include "client/step.h"

#include <algorithm>
#include <string>
#include <utility>

#include "client/router.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

// Why a path cannot be lent now but can be soon.
std::optional<Error> busy_error(const Link& link) {
  const PathState state = link.path.state();
  if (state == PathState::kLeased || state == PathState::kWorn)
    return link.path_error(std::string("is ") + path_state_name(state) +
                           "; a device step needs a usable one");
  if (link.path.is_listening() || !link.waiting.empty())
    return link.error(ErrorCode::kInvalidArgument,
                      "still owes replies; a device step begins when all calls are done");
  return std::nullopt;
}

// In a device step each shard of a layer has a slot of its worker's path to itself: the k-th shard
// that the worker has in the layer uses slot k. `num_shards` is how many it has so far.
std::optional<Error> unfit_error(const Link& link, size_t num_shards) {
  if (transport::ring_lender(link.path.channel()) == nullptr)
    return link.error(ErrorCode::kUnsupported,
                      std::string("is reached by ") + link.path.channel()->kind() +
                          "; device steps need shared memory: call experts() outside of a step");
  const uint32_t num_slots = link.path.geometry().num_slots;
  if (num_shards < num_slots) return std::nullopt;
  return link.error(ErrorCode::kUnsupported,
                    "has " + std::to_string(num_slots) + " slots, too few for its shards of a " +
                        "layer in a device step: call experts() outside of a step");
}

// The choice for one shard, or why there is none. `num_shards` counts each worker's shards of the
// layer so far.
const Link* choose(const Layer& layer, std::span<const uint32_t> holders, Links links,
                   const std::map<uint32_t, size_t>& num_shards, StepChoice& choice) {
  std::vector<uint32_t> left_out;
  std::optional<Error> busy, unfit;
  for (const uint32_t holder : holders) {
    const Link& link = *links[holder];
    if (link.path.is_lost()) continue;
    std::optional<Error> error = busy_error(link);
    if (error) {
      if (!busy) busy = std::move(error);
    } else {
      const auto counted = num_shards.find(holder);
      error = unfit_error(link, counted == num_shards.end() ? 0 : counted->second);
      if (!error) continue;
      if (!unfit) unfit = std::move(error);
    }
    left_out.push_back(holder);
  }
  if (const Link* picked = pick_holder(holders, links, left_out)) return picked;
  choice.is_busy = busy.has_value();
  choice.error = busy    ? std::move(*busy)
                 : unfit ? std::move(*unfit)
                         : lost_shard_error(layer, holders, links);
  return nullptr;
}

}  // namespace

StepChoice choose_step_holders(Links links, const std::map<uint32_t, Layer>& layers) {
  StepChoice choice;
  for (const auto& [index, layer] : layers) {
    StepHolders& chosen = choice.holders.emplace_back();
    chosen.layer = index;
    std::map<uint32_t, size_t> num_shards;
    for (const auto& holders : layer.holders) {
      const Link* link = choose(layer, holders, links, num_shards, choice);
      if (link == nullptr) return choice;
      ++num_shards[link->index];
      chosen.paths.push_back(link->index);
      choice.workers.push_back(link->index);
    }
  }
  std::sort(choice.workers.begin(), choice.workers.end());
  choice.workers.erase(std::unique(choice.workers.begin(), choice.workers.end()),
                       choice.workers.end());
  for (StepHolders& chosen : choice.holders) {
    for (uint32_t& path : chosen.paths) {
      const auto at = std::lower_bound(choice.workers.begin(), choice.workers.end(), path);
      path = static_cast<uint32_t>(at - choice.workers.begin());
    }
  }
  return choice;
}

StepLease OpenStep::begin(Links links, StepChoice choice, int64_t now) {
  if (choice.holders != holders_) {
    holders_ = std::move(choice.holders);
    ++holders_id_;
  }
  StepLease lease;
  lease.holders = holders_;
  lease.holders_id = holders_id_;
  paths_.clear();
  for (const uint32_t worker : choice.workers) {
    Link& link = *links[worker];
    lease.paths.push_back({worker, link.name, link.path.generation(), link.path.geometry(),
                           link.request_dtype, link.reply_dtype,
                           transport::ring_lender(link.path.channel())->ring(),
                           link.liveness.fd()});
    paths_.push_back({worker, link.path.generation()});
    link.path.lease();
    link.liveness.begin_to_owe(now);
  }
  return lease;
}

bool OpenStep::has_stand_in(const Link& link, Links links,
                            const std::map<uint32_t, Layer>& layers) const {
  const auto can_stand_in = [&](uint32_t holder) {
    const Link& other = *links[holder];
    return &other != &link && !other.path.is_lost() && !other.is_suspect();
  };
  for (const StepHolders& chosen : holders_) {
    const auto layer = layers.find(chosen.layer);
    for (size_t place = 0; place < chosen.paths.size(); ++place) {
      if (paths_[chosen.paths[place]].worker != link.index) continue;
      const auto& holders = layer->second.holders[place];
      if (std::none_of(holders.begin(), holders.end(), can_stand_in)) return false;
    }
  }
  return true;
}

void OpenStep::end(Links links, const std::map<uint32_t, Layer>& layers, const StepResult& result,
                   int64_t now) {
  for (size_t at = 0; at < paths_.size(); ++at) {
    Link& link = *links[paths_[at].worker];
    if (has(link, paths_[at]))
      link.path.end_lease(at < result.used.size() ? &result.used[at] : nullptr, result.has_failed);
  }
  for (const StepMessage& message : result.answered) {
    if (message.worker >= links.size()) continue;
    Link& link = *links[message.worker];
    link.hear(now);
    Counters& counters = link.counters[message.layer];
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
  for (const StepPath& path : paths_) links[path.worker]->tell_if_idle();
  paths_.clear();
}

}  // namespace dflash::client

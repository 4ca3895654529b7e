// SPDX-License-Identifier: Apache-2.0
#include "client/layer_table.h"

#include <algorithm>
#include <utility>

#include "wire/limits.h"

namespace dflash::client {
namespace {

Error plan_error(const LayerPlan& plan, const std::string& what) {
  return Error{ErrorCode::kInvalidArgument, "layer " + plan.name + ": " + what}.at(
      {{}, plan.layer, {}, {}});
}

Status check_plan(const LayerPlan& plan, size_t num_workers) {
  const auto is_width = [](uint32_t width) { return width >= 1 && width <= wire::kMaxRowWidth; };
  if (plan.layer >= wire::kMaxLayers)
    return plan_error(plan, "its index " + std::to_string(plan.layer) + " is above 4095");
  if (!is_width(plan.in_size) || !is_width(plan.out_size))
    return plan_error(plan, "row widths must be 1..65536");
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    const std::string shard = "shard " + std::to_string(plan.shards[s].shard);
    if (plan.shards[s].worker >= num_workers)
      return plan_error(plan, shard + " is placed on a worker that was not added");
    if (s > 0 && plan.shards[s].shard == plan.shards[s - 1].shard)
      return plan_error(plan, shard + " is listed twice");
  }
  return ok();
}

Status check_holders(const LayerPlan& plan, const ShardPlace& shard,
                     std::span<const uint32_t> workers, Links links) {
  const auto refuse = [&](const std::string& what) {
    return plan_error(plan, "shard " + std::to_string(shard.shard) + ": " + what);
  };
  if (workers.empty()) return refuse("it needs one holder at least");
  for (size_t i = 0; i < workers.size(); ++i) {
    if (workers[i] >= links.size())
      return refuse("there is no worker " + std::to_string(workers[i]));
    const Link &first = *links[workers[0]], &one = *links[workers[i]];
    if (std::find(workers.begin(), workers.begin() + static_cast<std::ptrdiff_t>(i), workers[i]) !=
        workers.begin() + static_cast<std::ptrdiff_t>(i))
      return refuse("worker " + one.name + " is named twice");
    // Rows are rounded to the wire dtypes, so that holders with others would give other bits.
    if (one.request_dtype != first.request_dtype || one.reply_dtype != first.reply_dtype) {
      return refuse("its holders disagree in wire dtypes: worker " + first.name + " has " +
                    dtype_name(first.request_dtype) + " and " + dtype_name(first.reply_dtype) +
                    ", worker " + one.name + " " + dtype_name(one.request_dtype) + " and " +
                    dtype_name(one.reply_dtype));
    }
  }
  return ok();
}

}  // namespace

Status LayerTable::define(const LayerPlan& plan, size_t num_workers) {
  if (layers_.contains(plan.layer))
    return plan_error(plan, "index " + std::to_string(plan.layer) + " is already defined");
  LayerPlan sorted = plan;
  std::sort(sorted.shards.begin(), sorted.shards.end(),
            [](const auto& a, const auto& b) { return a.shard < b.shard; });
  DFLASH_TRY(check_plan(sorted, num_workers));
  std::vector<std::vector<uint32_t>> experts;
  for (const ShardPlace& shard : sorted.shards) experts.push_back(shard.experts);
  auto table = ExpertTable::build(plan.num_experts, experts);
  if (!table.ok()) return std::move(table).error().with("layer " + plan.name);
  std::vector<std::vector<uint32_t>> holders;
  for (const ShardPlace& shard : sorted.shards) holders.push_back({shard.worker});
  layers_.emplace(plan.layer,
                  Layer{std::move(sorted), std::move(table).value(), std::move(holders)});
  return ok();
}

Status LayerTable::set_holders(uint32_t layer, uint32_t shard, const std::vector<uint32_t>& workers,
                               Links links) {
  const auto found = layers_.find(layer);
  if (found == layers_.end())
    return Error{ErrorCode::kInvalidArgument,
                 "layer " + std::to_string(layer) + " is not in the layer table"};
  const LayerPlan& plan = found->second.plan;
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    if (plan.shards[s].shard != shard) continue;
    DFLASH_TRY(check_holders(plan, plan.shards[s], workers, links));
    found->second.holders[s] = workers;
    return ok();
  }
  return plan_error(plan, "there is no shard " + std::to_string(shard));
}

const Layer* LayerTable::find(uint32_t index) const {
  const auto found = layers_.find(index);
  return found == layers_.end() ? nullptr : &found->second;
}

}  // namespace dflash::client

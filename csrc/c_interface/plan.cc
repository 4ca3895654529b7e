// The plan's messages come in one order (handover_plan.py), so that each is checked against what
// came before.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/plan.h"

#include <algorithm>
#include <utility>

#include "wire/limits.h"

namespace dflash::c_interface {
namespace {

// The longest time that a setting can name, 1,000,000 s; sums of it stay far below an overflow.
constexpr uint64_t kMaxTimeNs = 1'000'000'000'000'000;
// Beyond any file, and such that no offset of a page in memory or file can overflow.
constexpr uint64_t kMaxFileOffset = uint64_t{1} << 62;

Error plan_error(std::string what) {
  return Error{ErrorCode::kProtocol, "the supervisor's plan: " + std::move(what)};
}

Status check_time(const char* name, uint64_t time_ns, uint64_t least_ns) {
  if (time_ns >= least_ns && time_ns <= kMaxTimeNs) return ok();
  return plan_error(std::string(name) + " is " + std::to_string(time_ns) + " ns; allowed are " +
                    std::to_string(least_ns) + ".." + std::to_string(kMaxTimeNs));
}

// Expands ranges of expert ids. A bound is checked before anything is reserved for them.
Result<std::vector<uint32_t>> experts_of(const wire::PlannedShard& shard, uint32_t num_experts) {
  const std::string where =
      "layer " + std::to_string(shard.layer) + ", shard " + std::to_string(shard.shard);
  std::vector<uint32_t> experts;
  if (shard.expert_ranges.size() % 2 != 0) return plan_error(where + ": a range lacks its count");
  uint64_t next = 0;
  for (size_t i = 0; i < shard.expert_ranges.size(); i += 2) {
    const uint64_t first = shard.expert_ranges[i], count = shard.expert_ranges[i + 1];
    if (first < next || count == 0 || first + count > num_experts) {
      return plan_error(where + ": experts " + std::to_string(first) + " and " +
                        std::to_string(count) + " from there do not ascend within 0.." +
                        std::to_string(num_experts));
    }
    for (uint64_t expert = first; expert < first + count; ++expert)
      experts.push_back(static_cast<uint32_t>(expert));
    next = first + count;
  }
  return experts;
}

}  // namespace

Result<Dtype> planned_dtype(const std::string& name) {
  for (uint8_t i = 0; i < kNumDtypes; ++i) {
    if (name == dtype_name(static_cast<Dtype>(i))) return static_cast<Dtype>(i);
  }
  return plan_error("dtype '" + name + "' is none of f32, f16, bf16");
}

const wire::PlannedLayer* Plan::layer(uint32_t number) const {
  const auto found =
      std::lower_bound(layers.begin(), layers.end(), number,
                       [](const auto& one, uint32_t wanted) { return one.layer < wanted; });
  return found != layers.end() && found->layer == number ? &*found : nullptr;
}

const wire::PlannedTensor* Plan::tensor(std::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [name](const auto& one) { return one.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

client::ClientOptions Plan::client_options() const {
  client::ClientOptions options(static_cast<int64_t>(head.call_timeout_ns),
                                static_cast<int64_t>(head.stall_timeout_ns));
  options.spin_ns = static_cast<int64_t>(head.spin_ns);
  return options;
}

client::LayerPlan Plan::layer_plan(const wire::PlannedLayer& layer) const {
  const auto placed = shards.find(layer.layer);
  return {layer.layer,
          layer.name,
          layer.in_size,
          layer.out_size,
          layer.num_experts,
          placed == shards.end() ? std::vector<client::ShardPlace>() : placed->second,
          layer.cost_class};
}

Status PlanReader::take(wire::HandoverMessage message) {
  const std::string name = wire::handover_message_name(message);
  const wire::PlanHead& head = plan_.head;
  if (auto* one = std::get_if<wire::PlanHead>(&message); one != nullptr && !has_head_)
    return take_head(std::move(*one));
  if (has_head_ && !is_complete()) {
    ++num_taken_;
    auto* worker = std::get_if<wire::PlannedWorker>(&message);
    if (worker != nullptr && plan_.workers.size() < head.num_workers)
      return take_worker(std::move(*worker));
    auto* layer = std::get_if<wire::PlannedLayer>(&message);
    const bool has_workers = plan_.workers.size() == head.num_workers;
    if (layer != nullptr && has_workers && plan_.layers.size() < head.num_layers)
      return take_layer(std::move(*layer));
    const auto* shard = std::get_if<wire::PlannedShard>(&message);
    const bool has_layers = has_workers && plan_.layers.size() == head.num_layers;
    if (shard != nullptr && has_layers && num_shards_ < head.num_shards) return take_shard(*shard);
    auto* tensor = std::get_if<wire::PlannedTensor>(&message);
    if (tensor != nullptr && has_layers && num_shards_ == head.num_shards)
      return take_tensor(std::move(*tensor));
  }
  return plan_error("message " + name + " came where another belongs");
}

Plan PlanReader::take_plan() && {
  std::sort(plan_.layers.begin(), plan_.layers.end(),
            [](const auto& a, const auto& b) { return a.layer < b.layer; });
  return std::move(plan_);
}

Status PlanReader::take_head(wire::PlanHead head) {
  DFLASH_TRY(check_time("spin_ns", head.spin_ns, 0));
  DFLASH_TRY(check_time("call_timeout_ns", head.call_timeout_ns, 1));
  DFLASH_TRY(check_time("stall_timeout_ns", head.stall_timeout_ns, 1));
  num_expected_ = uint64_t{head.num_workers} + head.num_layers + head.num_shards + head.num_tensors;
  has_head_ = true;
  plan_.head = std::move(head);
  return ok();
}

Status PlanReader::take_worker(wire::PlannedWorker worker) {
  for (const std::string* name : {&worker.request_dtype, &worker.reply_dtype}) {
    if (auto dtype = planned_dtype(*name); !dtype.ok()) return std::move(dtype).error();
  }
  plan_.workers.push_back(std::move(worker));
  return ok();
}

Status PlanReader::take_layer(wire::PlannedLayer layer) {
  if (layer.num_experts == 0 || layer.num_experts > wire::kMaxExpertsPerShard)
    return plan_error("layer " + layer.name + " has " + std::to_string(layer.num_experts) +
                      " experts; allowed are 1.." + std::to_string(wire::kMaxExpertsPerShard));
  if (!num_experts_.emplace(layer.layer, layer.num_experts).second)
    return plan_error("layer " + std::to_string(layer.layer) + " comes twice");
  plan_.layers.push_back(std::move(layer));
  return ok();
}

Status PlanReader::take_shard(const wire::PlannedShard& shard) {
  const auto layer = num_experts_.find(shard.layer);
  if (layer == num_experts_.end() || shard.worker >= plan_.workers.size()) {
    return plan_error("a shard of layer " + std::to_string(shard.layer) + " at worker " +
                      std::to_string(shard.worker) + ": there is no such layer or worker");
  }
  auto experts = experts_of(shard, layer->second);
  if (!experts.ok()) return std::move(experts).error();
  plan_.shards[shard.layer].push_back(
      {shard.shard, shard.worker, shard.weights_fingerprint, std::move(experts).value()});
  ++num_shards_;
  return ok();
}

Status PlanReader::take_tensor(wire::PlannedTensor tensor) {
  if (!num_experts_.contains(tensor.layer))
    return plan_error("tensor " + tensor.name + " is of layer " + std::to_string(tensor.layer) +
                      ", which the plan does not have");
  if (tensor.file_offset > kMaxFileOffset)
    return plan_error("tensor " + tensor.name + " begins at byte " +
                      std::to_string(tensor.file_offset) + " of its file");
  plan_.tensors.push_back(std::move(tensor));
  return ok();
}

}  // namespace dflash::c_interface

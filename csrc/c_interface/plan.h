// The plan of a hand-over, taken together from its messages: what can be called, who holds it, and
// which tensors a program need not load.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "client/types.h"
#include "wire/handover_messages.h"

namespace dflash::c_interface {

// A complete plan does not change, so that pointers into it stay valid.
struct Plan {
  wire::PlanHead head;
  std::vector<wire::PlannedWorker> workers;
  std::vector<wire::PlannedLayer> layers;                      // in ascending number, once complete
  std::map<uint32_t, std::vector<client::ShardPlace>> shards;  // by layer
  std::vector<wire::PlannedTensor> tensors;

  // Null where there is none.
  const wire::PlannedLayer* layer(uint32_t number) const;
  const wire::PlannedTensor* tensor(std::string_view name) const;

  client::ClientOptions client_options() const;
  client::LayerPlan layer_plan(const wire::PlannedLayer& layer) const;
};

// Takes the messages of a plan one after another.
class PlanReader {
 public:
  // Errors: kProtocol for a message that does not come next, a count of experts beyond the layer's,
  // a worker or layer that the plan does not have, and numbers that no client can have.
  Status take(wire::HandoverMessage message);
  bool is_complete() const { return has_head_ && num_taken_ == num_expected_; }
  Plan take_plan() &&;

 private:
  Status take_head(wire::PlanHead head);
  Status take_worker(wire::PlannedWorker worker);
  Status take_layer(wire::PlannedLayer layer);
  Status take_shard(const wire::PlannedShard& shard);
  Status take_tensor(wire::PlannedTensor tensor);

  Plan plan_;
  bool has_head_ = false;
  uint64_t num_taken_ = 0, num_expected_ = 0;
  uint64_t num_shards_ = 0;
  std::map<uint32_t, uint32_t> num_experts_;  // by layer
};

// Reads a dtype by the name that it has in settings. Errors: kProtocol.
Result<Dtype> planned_dtype(const std::string& name);

}  // namespace dflash::c_interface

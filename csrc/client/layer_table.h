// The layers of a client: their shards, and who holds them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <vector>

#include "base/result.h"
#include "client/call.h"
#include "client/link.h"

namespace dflash::client {

// Every shard has a holder at least, and all of its holders were added and have equal wire dtypes.
// A layer stays where it is, because calls point to it.
class LayerTable {
 public:
  // Errors: kInvalidArgument naming what is wrong with the plan.
  Status define(const LayerPlan& plan, size_t num_workers);
  // Names the holders of a shard, preferred first. Errors: kInvalidArgument.
  Status set_holders(uint32_t layer, uint32_t shard, const std::vector<uint32_t>& workers,
                     Links links);
  const Layer* find(uint32_t index) const;
  const std::map<uint32_t, Layer>& all() const { return layers_; }

 private:
  std::map<uint32_t, Layer> layers_;
};

}  // namespace dflash::client

// Shards as a worker borrows them, out of a store on the processor.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <utility>

#include "compute/cpu/cpu_backend.h"
#include "compute/toy_experts.h"
#include "store/shard_store.h"

namespace dflash::worker::toy {

inline std::shared_ptr<compute::ExpertBackend> processor(
    compute::WeightsLayout layout = compute::WeightsLayout::kPacked) {
  auto backend = compute::CpuBackend::create(compute::Isa::kScalar, 1, {}, layout);
  REQUIRE(backend.ok());
  return std::move(backend).value();
}

inline store::ShardFacts facts_of(const compute::FfnSpec& spec, uint32_t num_experts,
                                  uint64_t fingerprint) {
  store::ShardFacts facts;
  facts.spec = spec;
  facts.num_local_experts = num_experts;
  facts.formats = Dtype::kF32;
  facts.weights_fingerprint = fingerprint;
  return facts;
}

inline std::shared_ptr<store::ResidentShard> borrow(store::ShardStore& store,
                                                    const store::ShardFacts& facts) {
  auto loan = store.borrow(facts);
  REQUIRE_MESSAGE(loan.ok(), (loan.ok() ? std::string() : loan.error().message));
  return std::move(loan).value();
}

// Complete with these experts.
inline std::shared_ptr<store::ResidentShard> borrow_loaded(store::ShardStore& store,
                                                           const store::ShardFacts& facts,
                                                           const compute::toy::Experts& experts) {
  auto loan = borrow(store, facts);
  for (uint32_t id = 0; !loan->is_complete() && id < facts.num_local_experts; ++id)
    REQUIRE(store.load_expert(loan, id, experts.weights(id)).ok());
  return loan;
}

}  // namespace dflash::worker::toy

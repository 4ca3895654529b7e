// Resident shards by what names their weights: lent, found again, limited, dropped; and what their
// source bytes add up to, whoever reads them.
// SPDX-License-Identifier: Apache-2.0
#include "store/shard_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "failed.h"
#include "worker/loans.h"

namespace dflash::store {
namespace {

using worker::toy::borrow;
using worker::toy::borrow_loaded;
using worker::toy::facts_of;
using worker::toy::processor;

constexpr uint32_t kNumExperts = 4;
// Far above what any step takes, sanitizers and a loaded machine included.
constexpr int64_t kPatienceMs = 20'000;

compute::FfnSpec toy_spec() {
  compute::FfnSpec spec;
  spec.in_size = 40;
  spec.intermediate_size = 24;
  spec.out_size = 36;
  return spec;
}

const compute::toy::Experts& toy_experts() {
  static const compute::toy::Experts experts(toy_spec(), kNumExperts, Dtype::kF32, 11);
  return experts;
}

ShardFacts facts(uint64_t fingerprint) { return facts_of(toy_spec(), kNumExperts, fingerprint); }

uint64_t expected_checksum() {
  std::vector<uint64_t> values;
  for (uint32_t id = 0; id < kNumExperts; ++id) {
    compute::ContentReader reader(toy_experts().weights(id));
    for (bool is_read = false; !is_read;) is_read = reader.read(64).value();
    values.push_back(reader.value());
  }
  return compute::shard_checksum(values);
}

// Whose reads wait until the test lets them go, or fail.
class Gate final : public compute::MappedBytes {
 public:
  Status copy(const std::byte* from, size_t num_bytes, std::byte* to) const override {
    ++num_reads;
    while (is_shut && !fails) std::this_thread::yield();
    if (fails) return Error{ErrorCode::kCheckpoint, "model.safetensors: cannot be read"};
    std::copy_n(from, num_bytes, to);
    return ok();
  }
  mutable std::atomic<uint32_t> num_reads{0};
  std::atomic<bool> is_shut{false}, fails{false};
};

compute::ExpertWeights behind(const Gate& gate, uint32_t id) {
  compute::ExpertWeights weights = toy_experts().weights(id);
  weights.gate.file = weights.up.file = weights.down.file = &gate;
  return weights;
}

ContentState wait_for_content(const ResidentShard& shard) {
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  for (;;) {
    ContentState state = shard.content();
    if (state.checksum || state.failure || deadline.has_passed()) return state;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_CASE("a shard that is complete is lent again, to as many as ask") {
  ShardStore store(processor());
  const auto first = borrow_loaded(store, facts(1), toy_experts());
  const auto second = borrow(store, facts(1));
  CHECK(second.get() == first.get());
  CHECK(second->is_complete());
  CHECK(store.num_shards() == 1);
  CHECK(borrow(store, facts(2)).get() != first.get());
  CHECK(store.resident_bytes() == first->resident_bytes());
}

TEST_CASE("what came back is dropped, what is borrowed stays") {
  ShardStore store(processor());
  auto kept = borrow_loaded(store, facts(1), toy_experts());
  auto copy = kept;
  borrow_loaded(store, facts(2), toy_experts());
  store.drop_unborrowed();
  CHECK(store.num_shards() == 1);
  kept.reset();
  store.drop_unborrowed();
  CHECK(store.num_shards() == 1);
  copy.reset();
  store.drop_unborrowed();
  CHECK(store.num_shards() == 0);
  CHECK(store.resident_bytes() == 0);
}

TEST_CASE("what came back is lent again, and makes room for what is not there") {
  const uint64_t room = compute::CpuBackend::predicted_bytes(
      compute::Isa::kScalar, toy_spec(), kNumExperts, compute::ResidentFormats(Dtype::kF32));
  ShardStore store(processor(), room);
  const ResidentShard* const first = borrow_loaded(store, facts(1), toy_experts()).get();
  CHECK(store.num_shards() == 1);
  {
    const auto again = borrow(store, facts(1));
    CHECK(again.get() == first);
    CHECK(again->is_complete());
    CHECK(!store.borrow(facts(2)).ok());
    CHECK(store.num_shards() == 1);
  }
  CHECK(borrow_loaded(store, facts(2), toy_experts())->is_complete());
  CHECK(store.num_shards() == 1);
}

TEST_CASE("a shard that came back damaged is lent to nobody, and loaded anew") {
  ShardStore store(processor());
  auto loan = borrow_loaded(store, facts(1), toy_experts());
  CHECK(loan->are_packed_as_loaded(0, kNumExperts));
  REQUIRE(loan->flip_bit(2, 100, 3));
  CHECK(loan->are_packed_as_loaded(0, 2));
  CHECK(!loan->are_packed_as_loaded(2, kNumExperts));
  CHECK(loan->is_damaged(2));
  CHECK(!loan->is_damaged(1));
  // It is damaged for good, even if the bit should fall back.
  REQUIRE(loan->flip_bit(2, 100, 3));
  CHECK(!loan->are_packed_as_loaded(0, kNumExperts));
  // In use it is shared as it is, because its user's scrub has it loaded again.
  CHECK(borrow(store, facts(1)).get() == loan.get());
  const uint64_t taken = store.resident_bytes();
  loan.reset();
  auto fresh = borrow(store, facts(1));
  CHECK(!fresh->is_complete());
  CHECK(store.num_shards() == 1);
  fresh.reset();
  fresh = borrow_loaded(store, facts(1), toy_experts());
  CHECK(fresh->are_packed_as_loaded(0, kNumExperts));
  CHECK(store.resident_bytes() == taken);
}

TEST_CASE("mapped weights have nothing packed that could change") {
  ShardStore store(processor(compute::WeightsLayout::kMapped));
  CHECK(borrow_loaded(store, facts(1), toy_experts())->are_packed_as_loaded(0, kNumExperts));
}

TEST_CASE("a loan may outlive its store") {
  std::shared_ptr<ResidentShard> loan;
  {
    ShardStore store(processor());
    loan = borrow_loaded(store, facts(1), toy_experts());
  }
  CHECK(loan->is_complete());
  CHECK(loan->content().checksum == expected_checksum());
}

TEST_CASE("a shard that is being loaded is lent to nobody else, and what failed is made anew") {
  ShardStore store(processor());
  auto loading = borrow(store, facts(1));
  REQUIRE(store.load_expert(loading, 0, toy_experts().weights(0)).ok());
  const auto refused = store.borrow(facts(1));
  REQUIRE(!refused.ok());
  CHECK(refused.error().message == "weights_fingerprint 1 is being loaded by somebody else");
  loading.reset();
  CHECK(borrow_loaded(store, facts(1), toy_experts())->content().num_read == kNumExperts);
}

TEST_CASE("another description under the same fingerprint is another shard") {
  ShardStore store(processor());
  const auto loan = borrow_loaded(store, facts(1), toy_experts());
  ShardFacts other = facts(1);
  other.spec.activation = compute::Activation::kRelu;
  const auto of_another = borrow_loaded(store, other, toy_experts());
  CHECK(of_another.get() != loan.get());
  CHECK(of_another->number() != loan->number());
  CHECK(store.num_shards() == 2);
  CHECK(borrow(store, facts(1)).get() == loan.get());
  CHECK(borrow(store, other).get() == of_another.get());
}

TEST_CASE("what nobody borrows makes room in the order in which it came back, and no more of it") {
  const uint64_t one = compute::CpuBackend::predicted_bytes(
      compute::Isa::kScalar, toy_spec(), kNumExperts, compute::ResidentFormats(Dtype::kF32));
  for (const bool is_limited : {true, false}) {
    ShardStore store(processor(), is_limited ? 3 * one : 0);
    const std::optional<uint64_t> free_bytes =
        is_limited ? std::nullopt : std::optional<uint64_t>(0);
    auto used = borrow_loaded(store, facts(1), toy_experts());
    auto second = borrow_loaded(store, facts(2), toy_experts());
    auto third = borrow_loaded(store, facts(3), toy_experts());
    third.reset();
    nap_ns(1'000'000);
    second.reset();
    CHECK(store.num_shards() == 3);
    CHECK(store.borrow(facts(4), free_bytes).ok());
    CHECK(store.num_shards() == 3);
    CHECK(borrow(store, facts(1)).get() == used.get());
    CHECK(borrow(store, facts(2))->is_complete());
  }
}

TEST_CASE("a shard that the free memory has no room for is refused before it is loaded") {
  ShardStore store(processor());
  const auto used = borrow_loaded(store, facts(1), toy_experts());
  const auto refused = store.borrow(facts(2), 100);
  REQUIRE(refused == Failed(ErrorCode::kInvalidArgument, "are free there now"));
  CHECK(store.borrow(facts(1), 0).ok());
  CHECK(store.borrow(facts(2), 1 << 20).ok());
}

TEST_CASE("what nobody borrows is kept for as long as was said") {
  ShardStore store(processor());
  auto used = borrow_loaded(store, facts(1), toy_experts());
  borrow_loaded(store, facts(2), toy_experts());
  const int64_t left_ns = store.drop_unborrowed(int64_t{3600} * 1'000'000'000);
  CHECK(left_ns > 0);
  CHECK(store.num_shards() == 2);
  nap_ns(1'000'000);
  CHECK(store.drop_unborrowed(1) == 0);
  CHECK(store.num_shards() == 1);
  CHECK(!used->is_shared());
  const auto again = borrow(store, facts(1));
  CHECK(used->is_shared());
}

TEST_CASE("what a loading that failed has left is freed alone") {
  ShardStore store(processor());
  borrow_loaded(store, facts(1), toy_experts());
  auto loading = borrow(store, facts(2));
  store.drop_failed();
  CHECK(store.num_shards() == 2);
  loading.reset();
  store.drop_failed();
  CHECK(store.num_shards() == 1);
}

TEST_CASE("shards beyond the memory limit are refused before they are loaded") {
  const uint64_t room = compute::CpuBackend::predicted_bytes(compute::Isa::kScalar, toy_spec(), 5,
                                                             compute::ResidentFormats(Dtype::kF32));
  ShardStore store(processor(), room);
  auto first = borrow(store, facts_of(toy_spec(), 3, 1));
  const auto refused = store.borrow(facts_of(toy_spec(), 3, 2));
  REQUIRE(refused == Failed(ErrorCode::kInvalidArgument));
  CHECK(refused.error().message.find("memory: its 3 experts need") == 0);
  CHECK(store.borrow(facts_of(toy_spec(), 2, 2)).ok());
  first.reset();
  store.drop_unborrowed();
  CHECK(store.borrow(facts_of(toy_spec(), 5, 3)).ok());
}

TEST_CASE("mapped weights take nothing of the memory limit") {
  ShardStore store(processor(compute::WeightsLayout::kMapped), 1);
  CHECK(borrow_loaded(store, facts(1), toy_experts())->is_complete());
}

TEST_CASE("bad descriptions are refused and count for nothing") {
  ShardStore store(processor(), 1 << 20);
  ShardFacts bad = facts(1);
  bad.spec.in_size = 0;
  CHECK(!store.borrow(bad).ok());
  CHECK(!store.borrow(facts_of(toy_spec(), 0, 1)).ok());
  CHECK(!store.borrow(facts_of(toy_spec(), 65536, 1)).ok());
  CHECK(store.num_shards() == 0);
  const auto loan = borrow(store, facts(1));
  const Status nowhere = store.load_expert(loan, kNumExperts, toy_experts().weights(0));
  REQUIRE(!nowhere.ok());
  CHECK(nowhere.error().message.find("local expert 4") == 0);
}

TEST_CASE("packed and mapped holders say the same of the same bytes") {
  ShardStore packed(processor()), mapped(processor(compute::WeightsLayout::kMapped));
  const auto at_load = borrow_loaded(packed, facts(1), toy_experts());
  CHECK(at_load->content().checksum == expected_checksum());
  const auto later = borrow_loaded(mapped, facts(1), toy_experts());
  CHECK(wait_for_content(*later).checksum == expected_checksum());
}

TEST_CASE("a mapped shard is unchecked until the background reader has read it") {
  Gate gate;
  ShardStore store(processor(compute::WeightsLayout::kMapped));
  const auto loan = borrow(store, facts(1));
  gate.is_shut = true;
  for (uint32_t id = 0; id < kNumExperts; ++id)
    REQUIRE(store.load_expert(loan, id, behind(gate, id)).ok());
  CHECK(!loan->content().checksum);
  CHECK(loan->keeps_sources(0));
  gate.is_shut = false;
  const ContentState done = wait_for_content(*loan);
  CHECK(done.num_read == kNumExperts);
  CHECK(done.checksum == expected_checksum());
}

TEST_CASE("bytes that cannot be read leave the shard unchecked, with the reason") {
  Gate gate;
  ShardStore store(processor(compute::WeightsLayout::kMapped));
  const auto loan = borrow(store, facts(1));
  gate.is_shut = true;
  for (uint32_t id = 0; id < kNumExperts; ++id)
    REQUIRE(store.load_expert(loan, id, behind(gate, id)).ok());
  gate.fails = true;
  const ContentState state = wait_for_content(*loan);
  CHECK(!state.checksum);
  REQUIRE(state.failure.has_value());
  CHECK(state.failure->message == "model.safetensors: cannot be read");
}

TEST_CASE("a store that goes away stops reading within one step") {
  // The gate opens once the store has begun to go away, which a busy machine may delay: then it is
  // tried again with more time.
  uint32_t num_reads = 0;
  for (int64_t shut_ms = 20; num_reads != 1 && shut_ms < kPatienceMs; shut_ms *= 5) {
    Gate gate;
    std::thread opener;
    {
      ShardStore store(processor(compute::WeightsLayout::kMapped));
      const auto loan = borrow(store, facts(1));
      gate.is_shut = true;
      for (uint32_t id = 0; id < kNumExperts; ++id)
        REQUIRE(store.load_expert(loan, id, behind(gate, id)).ok());
      const Deadline deadline = Deadline::after_ms(kPatienceMs);
      while (gate.num_reads == 0 && !deadline.has_passed()) std::this_thread::yield();
      opener = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(shut_ms));
        gate.is_shut = false;
      });
    }
    opener.join();
    num_reads = gate.num_reads;
  }
  CHECK(num_reads == 1);
}

}  // namespace
}  // namespace dflash::store

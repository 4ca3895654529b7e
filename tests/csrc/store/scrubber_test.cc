// Weights that change in memory: a scrub finds them, nothing is computed from them meanwhile, and
// loading them again makes them right.
// SPDX-License-Identifier: Apache-2.0
#include "store/scrubber.h"

#include <doctest/doctest.h>

#include <thread>
#include <vector>

#include "base/clock.h"
#include "failed.h"
#include "worker/loans.h"

namespace dflash::store {
namespace {

using worker::toy::borrow_loaded;
using worker::toy::facts_of;
using worker::toy::processor;

constexpr uint32_t kNumExperts = 4;
// A pass takes no time, so that a scrub is done at once.
constexpr double kAtOnce = 1e-9;

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

struct Scene {
  std::shared_ptr<ShardStore> store = std::make_shared<ShardStore>(processor());
  std::shared_ptr<ResidentShard> shard =
      borrow_loaded(*store, facts_of(toy_spec(), kNumExperts, 7), toy_experts());
  Scrubber scrubber{store, kAtOnce};
  compute::YieldingProgress progress;

  Status forward(std::vector<float>& reply) {
    static const std::vector<float> row(toy_spec().in_size, 0.5F);
    const std::vector<uint16_t> counts{1}, ids{2};
    const std::vector<float> weights{1.0F};
    reply.assign(toy_spec().out_size, 0.0F);
    compute::ForwardArgs args;
    args.rows = reinterpret_cast<const std::byte*>(row.data());
    args.num_rows = 1;
    args.row_counts = counts;
    args.local_expert_ids = ids;
    args.weights = weights;
    args.reply = reinterpret_cast<std::byte*>(reply.data());
    return shard->forward(args, progress);
  }
};

TEST_CASE("a flipped bit is found by the scrub, wherever it is") {
  for (const size_t byte : {size_t{0}, size_t{1000}, size_t{6000}}) {
    for (uint32_t expert = 0; expert < kNumExperts; ++expert) {
      Scene scene;
      REQUIRE(scene.shard->flip_bit(expert, byte, byte % 8));
      const auto damage = scene.scrubber.run();
      REQUIRE(damage.has_value());
      CHECK(damage->shard_number == scene.shard->number());
      CHECK(damage->local_expert_id == expert);
      CHECK(scene.shard->is_damaged(expert));
      CHECK(scene.scrubber.stats().damages == 1);
      CHECK(scene.scrubber.stats().scrubbed_bytes > 0);
    }
  }
}

TEST_CASE("nothing is computed from damaged weights, and reloading makes them right") {
  Scene scene;
  std::vector<float> right, after;
  REQUIRE(scene.forward(right).ok());
  REQUIRE(scene.shard->flip_bit(2, 3, 6));
  REQUIRE(scene.scrubber.run().has_value());

  CHECK(scene.forward(after) == Failed(ErrorCode::kWorkerFailed, "local expert 2"));

  // A request that waits meanwhile is answered once the expert is there again.
  Status answered = ok();
  std::thread waiting([&] { answered = scene.forward(after); });
  CHECK(scene.shard->reload_expert(2, toy_experts().weights(2), scene.progress).ok());
  waiting.join();
  CHECK(answered.ok());
  CHECK(after == right);
  CHECK(!scene.shard->is_damaged(2));
}

TEST_CASE("other bytes than those of the first loading do not pass for them") {
  Scene scene;
  REQUIRE(scene.shard->flip_bit(1, 9, 1));
  REQUIRE(scene.scrubber.run().has_value());
  CHECK(scene.shard->reload_expert(1, toy_experts().weights(0), scene.progress) ==
        Failed(ErrorCode::kCheckpoint));
  CHECK(scene.shard->is_damaged(1));
  CHECK(!scene.shard->reload_expert(0, toy_experts().weights(0), scene.progress).ok());
}

TEST_CASE("a scrub of whole weights goes on until it is stopped, with a store that is empty too") {
  for (const bool is_empty : {false, true}) {
    Scene scene;
    if (is_empty) {
      scene.shard.reset();
      scene.store->drop_unborrowed();
    }
    std::thread scrub([&] { CHECK(!scene.scrubber.run().has_value()); });
    if (!is_empty) {
      // More than one pass over the shard, which takes well below a millisecond.
      const uint64_t enough = 3 * scene.store->resident_bytes();
      const Deadline deadline = Deadline::after_ms(20'000);
      while (scene.scrubber.stats().scrubbed_bytes < enough && !deadline.has_passed())
        std::this_thread::yield();
      CHECK(scene.scrubber.stats().scrubbed_bytes >= enough);
    }
    scene.scrubber.stop();
    scrub.join();
    CHECK(scene.scrubber.stats().damages == 0);
  }
}

TEST_CASE("a period that is shortened holds at once") {
  Scene scene;
  Scrubber scrubber{scene.store, 1e8};  // which would leave years between two experts
  std::thread scrub([&] { CHECK(!scrubber.run().has_value()); });
  const uint64_t enough = 3 * scene.store->resident_bytes();
  const Deadline deadline = Deadline::after_ms(20'000);
  while (scrubber.stats().scrubbed_bytes == 0 && !deadline.has_passed()) std::this_thread::yield();
  scrubber.set_period(kAtOnce);
  while (scrubber.stats().scrubbed_bytes < enough && !deadline.has_passed())
    std::this_thread::yield();
  CHECK(scrubber.stats().scrubbed_bytes >= enough);
  scrubber.stop();
  scrub.join();
}

}  // namespace
}  // namespace dflash::store

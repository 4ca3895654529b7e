// Files that change while a shard computes from them: what is computed are the bits of the bytes
// that were loaded, or it is an error that names the file; and all is well once the file is.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "failed.h"
#include "store/temporary_file.h"
#include "worker/loans.h"

namespace dflash::store {
namespace {

using worker::toy::facts_of;
using worker::toy::processor;

constexpr uint32_t kNumExperts = 4;
constexpr uint32_t kIn = 128, kInner = 96, kOut = 120;
constexpr size_t kFirstBytes = size_t{kIn} * kInner * sizeof(float);
constexpr size_t kSecondBytes = size_t{kInner} * kOut * sizeof(float);
constexpr size_t kExpertBytes = 2 * kFirstBytes + kSecondBytes;
// Far above what any step takes, sanitizers and a loaded machine included.
constexpr int64_t kPatienceMs = 20'000;

compute::FfnSpec toy_spec() {
  compute::FfnSpec spec;
  spec.in_size = kIn;
  spec.intermediate_size = kInner;
  spec.out_size = kOut;
  return spec;
}

std::vector<std::byte> toy_content() {
  const compute::toy::Experts experts(toy_spec(), kNumExperts, Dtype::kF32, 11);
  std::vector<std::byte> content;
  for (uint32_t id = 0; id < kNumExperts; ++id) {
    const auto& expert = experts.expert(id);
    for (const auto* part : {&expert.gate, &expert.up, &expert.down})
      content.insert(content.end(), part->begin(), part->end());
  }
  return content;
}

// With `transposed`, the matrices are read through the mapping, else from the file.
compute::ExpertWeights weights_in(const MappedFile& file, uint32_t id, bool transposed) {
  const auto matrix = [&](uint64_t offset, uint32_t outputs, uint32_t inputs) {
    return file
        .matrix(offset, Dtype::kF32, outputs, inputs, transposed ? 1 : inputs,
                transposed ? outputs : 1)
        .value();
  };
  const uint64_t first = id * kExpertBytes;
  compute::ExpertWeights weights;
  weights.gate = matrix(first, kInner, kIn);
  weights.up = matrix(first + kFirstBytes, kInner, kIn);
  weights.down = matrix(first + 2 * kFirstBytes, kOut, kInner);
  return weights;
}

struct Scene {
  std::vector<std::byte> content = toy_content();
  TemporaryFile file{content};
  std::shared_ptr<MappedFile> mapped = MappedFile::open(file.path()).value();
  std::shared_ptr<compute::ExpertBackend> backend = processor(compute::WeightsLayout::kMapped);
  std::shared_ptr<ShardStore> store = std::make_shared<ShardStore>(backend);
  std::shared_ptr<ResidentShard> shard;
  compute::YieldingProgress progress;

  explicit Scene(bool transposed, bool is_read = true) {
    const ShardFacts facts = facts_of(toy_spec(), kNumExperts, 7);
    if (is_read) {
      shard = worker::toy::borrow(*store, facts);
    } else {  // no store, and so no background reader
      auto layer =
          backend->create_layer(facts.spec, kNumExperts, facts.formats, facts.numerics).value();
      shard = std::make_shared<ResidentShard>(facts, backend, std::move(layer), 0,
                                              ResidentShard::OfStore{});
    }
    REQUIRE(shard->compute_from(mapped).ok());
    for (uint32_t id = 0; id < kNumExperts; ++id) {
      const compute::ExpertWeights weights = weights_in(*mapped, id, transposed);
      REQUIRE((is_read ? store->load_expert(shard, id, weights)
                       : shard->load_expert(id, weights, progress))
                  .ok());
    }
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (is_read && !shard->content().checksum && !deadline.has_passed())
      std::this_thread::yield();
    REQUIRE(shard->content().checksum.has_value() == is_read);
  }

  Status forward(uint16_t expert, std::vector<float>& reply) {
    static const std::vector<float> row(kIn, 0.5F);
    const std::vector<uint16_t> counts{1}, ids{expert};
    const std::vector<float> weights{1.0F};
    reply.assign(kOut, 0.0F);
    compute::ForwardArgs args;
    args.rows = reinterpret_cast<const std::byte*>(row.data());
    args.num_rows = 1;
    args.row_counts = counts;
    args.local_expert_ids = ids;
    args.weights = weights;
    args.reply = reinterpret_cast<std::byte*>(reply.data());
    return shard->forward(args, progress);
  }
  std::vector<float> right(uint16_t expert) {
    std::vector<float> reply;
    REQUIRE(forward(expert, reply).ok());
    return reply;
  }
  void require_refused(uint16_t expert) {
    std::vector<float> reply;
    CHECK(forward(expert, reply) == Failed(ErrorCode::kCheckpoint, file.path()));
  }
  std::vector<std::byte> flipped(size_t at) const { return {content[at] ^ std::byte{4}}; }
};

TEST_CASE(
    "a bit flipped in the file is never computed from, other experts are, and all once it is "
    "what it was") {
  for (const bool transposed : {false, true}) {
    Scene scene(transposed);
    std::vector<std::vector<float>> right;
    for (uint16_t id = 0; id < kNumExperts; ++id) right.push_back(scene.right(id));
    // In the gate, the up and the down matrix of expert 2.
    for (const size_t offset : {size_t{5}, kFirstBytes + 77, kExpertBytes - 1}) {
      const size_t at = 2 * kExpertBytes + offset;
      scene.file.write(static_cast<off_t>(at), scene.flipped(at));
      for (int again = 0; again < 3; ++again) scene.require_refused(2);
      for (const uint16_t other : std::vector<uint16_t>{0, 1, 3})
        CHECK(scene.right(other) == right[other]);
      scene.file.write(static_cast<off_t>(at), {scene.content[at]});
      CHECK(scene.right(2) == right[2]);
    }
  }
}

TEST_CASE("a file whose times alone change is computed from") {
  Scene scene(false);
  const std::vector<float> right = scene.right(1);
  for (int round = 0; round < 5; ++round) {
    scene.file.touch();
    CHECK(scene.right(1) == right);
  }
}

TEST_CASE("a file that is cut off is named, and computed from once it is whole") {
  for (const bool transposed : {false, true}) {
    Scene scene(transposed);
    const std::vector<float> right = scene.right(3);
    for (const size_t length : {size_t{0}, size_t{5000}, 3 * kExpertBytes + kFirstBytes}) {
      scene.file.shorten(static_cast<off_t>(length));
      for (int again = 0; again < 2; ++again) scene.require_refused(3);
      scene.file.write(0, scene.content);
      CHECK(scene.right(3) == right);
    }
  }
}

TEST_CASE("an expert that nobody had read whole is not computed from after a change") {
  Scene scene(false, /*is_read=*/false);
  std::vector<float> reply;
  CHECK(scene.forward(0, reply).ok());
  scene.file.write(0, {scene.content[0]});
  scene.require_refused(0);
  CHECK(!scene.shard->content().checksum);
}

TEST_CASE("while somebody changes the file all the time, each reply has the right bits") {
  for (const bool transposed : {false, true}) {
    Scene scene(transposed);
    const std::vector<float> right = scene.right(1);
    std::atomic<bool> is_over{false};
    const size_t at = kExpertBytes + 400;
    std::thread writer([&] {
      for (uint32_t round = 0; !is_over.load(); ++round) {
        scene.file.write(static_cast<off_t>(at), scene.flipped(at));
        if (round % 8 == 0) scene.file.shorten(static_cast<off_t>(kExpertBytes));
        std::this_thread::yield();
        scene.file.write(0, scene.content);
        nap_ns(1'000'000 * (round % 4));
      }
    });
    uint32_t num_right = 0, num_refused = 0;
    std::vector<float> reply;
    for (int call = 0; call < 60; ++call) {
      if (scene.forward(1, reply).ok()) {
        CHECK(reply == right);
        ++num_right;
      } else {
        ++num_refused;
      }
    }
    is_over = true;
    writer.join();
    CHECK(num_right + num_refused == 60);
    CHECK(scene.right(1) == right);
  }
}

}  // namespace
}  // namespace dflash::store

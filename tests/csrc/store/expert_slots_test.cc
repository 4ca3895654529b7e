// Slots for a part of the experts: replies have the bits of packed experts whatever is in memory;
// what is read are the misses of the least recently used order; damaged and shortened files are
// found before a result leaves.
// SPDX-License-Identifier: Apache-2.0
#include "store/expert_slots.h"

#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <random>
#include <thread>
#include <vector>

#include "failed.h"
#include "store/panel_rows.h"
#include "store/scrubber.h"
#include "store/temporary_file.h"
#include "worker/loans.h"

namespace dflash::store {
namespace {

using toy::forward;
using toy::panel_spec;
using toy::panels_of;
using toy::replied;
using toy::step_of;
using worker::toy::borrow;
using worker::toy::borrow_loaded;
using worker::toy::facts_of;
using worker::toy::processor;

constexpr uint32_t kNumExperts = 6, kNumShards = 3;

// One layer: its experts packed, and a file of their panels.
struct Layer {
  uint64_t fingerprint;
  compute::toy::Experts experts;
  std::shared_ptr<ResidentShard> packed, slotted;
  std::vector<std::byte> content;
  TemporaryFile file;

  Layer(ShardStore& packing, ShardStore& store, const compute::FfnSpec& spec, uint32_t number)
      : fingerprint(100 + number),
        experts(spec, kNumExperts, Dtype::kF32, 11 + number),
        packed(borrow_loaded(packing, facts_of(spec, kNumExperts, fingerprint), experts)),
        slotted(borrow(store, facts_of(spec, kNumExperts, fingerprint))),
        content(panels_of(*packed)),
        file(content) {}
  Status take() {
    auto direct = std::shared_ptr<DirectFile>(
        DirectFile::of_descriptor(OwnedFd(::open(file.path(), O_RDONLY | O_CLOEXEC)), file.path())
            .value());
    for (uint32_t id = 0; id < kNumExperts; ++id) {
      const ResidentShard::Packed facts = packed->packed(id);
      DFLASH_TRY(slotted->slot_expert(id, direct, id * step_of(*packed), facts.content_checksum,
                                      facts.panels_sum));
    }
    return ok();
  }
};

struct Scene {
  compute::FfnSpec spec;
  std::shared_ptr<ShardStore> packing = std::make_shared<ShardStore>(processor());
  uint64_t expert_bytes = step_of(*borrow(*packing, facts_of(spec, kNumExperts, 1)));
  std::shared_ptr<ShardStore> store;
  std::vector<std::unique_ptr<Layer>> layers;
  compute::YieldingProgress progress;

  explicit Scene(uint32_t num_slots, bool has_biases = false) : spec(panel_spec(has_biases)) {
    store = std::make_shared<ShardStore>(processor(), 0, num_slots * expert_bytes);
    for (uint32_t number = 0; number < kNumShards; ++number)
      layers.push_back(std::make_unique<Layer>(*packing, *store, spec, number));
  }
  void take_all() {
    for (const auto& layer : layers) REQUIRE(layer->take().ok());
  }
};

std::vector<uint16_t> some_ids(std::mt19937& random) {
  std::vector<uint16_t> ids;
  for (uint16_t id = 0; id < kNumExperts; ++id)
    if (random() % 2 == 0) ids.push_back(id);
  if (ids.empty()) ids.push_back(static_cast<uint16_t>(random() % kNumExperts));
  return ids;
}

TEST_CASE("replies have the bits of packed experts, and the misses are those of the LRU order") {
  for (const bool has_biases : {false, true}) {
    for (const uint32_t num_slots : {kNumExperts, kNumExperts + 3, kNumShards * kNumExperts}) {
      Scene scene(num_slots, has_biases);
      scene.take_all();
      std::mt19937 random(num_slots);
      std::list<std::pair<uint32_t, uint16_t>> used;  // least recently used first
      uint64_t misses = 0;
      for (int call = 0; call < 120; ++call) {
        const auto number = static_cast<uint32_t>(random() % kNumShards);
        Layer& layer = *scene.layers[number];
        const std::vector<uint16_t> ids = some_ids(random);
        const uint32_t num_rows = call % 10 == 0 ? 40 : 1;
        CHECK(replied(*layer.slotted, ids, num_rows) == replied(*layer.packed, ids, num_rows));
        std::vector<uint16_t> missing;
        for (const uint16_t id : ids) {
          const auto found = std::find(used.begin(), used.end(), std::pair{number, id});
          if (found == used.end())
            missing.push_back(id);
          else
            used.splice(used.end(), used, found);
        }
        misses += missing.size();
        for (const uint16_t id : missing) {
          if (used.size() == num_slots) used.pop_front();
          used.emplace_back(number, id);
        }
      }
      const SlotStats stats = scene.store->slots()->stats();
      CHECK(stats.misses == misses);
      CHECK(stats.num_slots == num_slots);
      CHECK(stats.read_bytes == misses * scene.expert_bytes);
      CHECK(scene.store->resident_bytes() <= num_slots * scene.expert_bytes);
    }
  }
}

TEST_CASE("shards of one store may be called at the same time") {
  Scene scene(kNumExperts + 1);
  scene.take_all();
  std::vector<std::thread> callers;
  for (uint32_t number = 0; number < kNumShards; ++number) {
    callers.emplace_back([&, number] {
      std::mt19937 random(number);
      Layer& layer = *scene.layers[number];
      for (int call = 0; call < 60; ++call) {
        const std::vector<uint16_t> ids = some_ids(random);
        CHECK(replied(*layer.slotted, ids) == replied(*layer.packed, ids));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_CASE("slots for less than a layer's experts are refused with both sizes") {
  Scene scene(kNumExperts - 1);
  CHECK(scene.layers[0]->take() ==
        Failed(ErrorCode::kInvalidArgument, "room for 5 experts, and a call may need the 6"));
}

TEST_CASE("a file that was damaged or cut off is packed again, and no reply is wrong") {
  for (const bool is_cut : {false, true}) {
    Scene scene(kNumExperts);
    scene.take_all();
    Layer& layer = *scene.layers[1];
    if (is_cut)
      layer.file.shorten(static_cast<off_t>(2 * scene.expert_bytes));
    else
      layer.file.write(static_cast<off_t>(3 * scene.expert_bytes + 200),
                       {layer.content[3 * scene.expert_bytes + 200] ^ std::byte{8}});
    Scrubber scrubber(scene.store, 0);
    std::atomic<uint32_t> num_mended{0};
    std::thread mender([&] {
      while (const auto damage = scrubber.run()) {
        CHECK(damage->shard_number == layer.slotted->number());
        const auto weights = layer.experts.weights(damage->local_expert_id);
        CHECK(layer.slotted->reload_expert(damage->local_expert_id, weights, scene.progress).ok());
        ++num_mended;
      }
    });
    std::mt19937 random(5);
    for (int call = 0; call < 40; ++call) {
      Layer& called = *scene.layers[random() % kNumShards];
      const std::vector<uint16_t> ids = some_ids(random);
      CHECK(replied(*called.slotted, ids) == replied(*called.packed, ids));
    }
    scrubber.stop();
    mender.join();
    CHECK(num_mended == (is_cut ? kNumExperts - 2 : 1));
  }
}

TEST_CASE("without anybody who packs it again, an expert that cannot be read is a typed error") {
  Scene scene(kNumExperts);
  scene.take_all();
  scene.layers[0]->file.shorten(0);
  std::vector<float> reply;
  CHECK(forward(*scene.layers[0]->slotted, {2}, 1, reply) ==
        Failed(ErrorCode::kWorkerFailed, "local expert 2"));
}

}  // namespace
}  // namespace dflash::store

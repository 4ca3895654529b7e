// Experts in files of panels: what is computed are the bits of packed experts, wherever panels lie
// and whatever happens to the file; panels that are not what their file says are never computed
// from, and are told to whoever loads experts again.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "base/clock.h"
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

constexpr uint32_t kNumExperts = 4;
// Far above what any step takes, sanitizers and a loaded machine included.
constexpr int64_t kPatienceMs = 20'000;

struct Scene {
  compute::toy::Experts experts{panel_spec(true), kNumExperts, Dtype::kF32, 11};
  std::shared_ptr<ShardStore> packing = std::make_shared<ShardStore>(processor());
  std::shared_ptr<ShardStore> mapping = std::make_shared<ShardStore>(processor());
  std::shared_ptr<ResidentShard> packed =
      borrow_loaded(*packing, facts_of(panel_spec(true), kNumExperts, 7), experts);
  std::vector<std::byte> content = panels_of(*packed);
  TemporaryFile file{content};
  std::shared_ptr<ResidentShard> stored =
      borrow(*mapping, facts_of(panel_spec(true), kNumExperts, 7));
  compute::YieldingProgress progress;

  Status map(ShardStore& store, const std::shared_ptr<ResidentShard>& shard, uint32_t id) {
    const ResidentShard::Packed facts = packed->packed(id);
    auto mapped = std::shared_ptr<MappedFile>(MappedFile::open(file.path()).value());
    return store.map_expert(shard, id, mapped, id * step_of(*packed), facts.content_checksum,
                            facts.panels_sum);
  }
  void map_all() {
    for (uint32_t id = 0; id < kNumExperts; ++id) REQUIRE(map(*mapping, stored, id).ok());
  }
  // Loads again what is reported until the scene ends, as a worker does.
  struct Mender {
    Scene& scene;
    Scrubber scrubber{scene.mapping, 0};
    std::atomic<uint32_t> num_mended{0};
    std::thread thread{[this] {
      while (const auto damage = scrubber.run()) {
        REQUIRE(damage->shard_number == scene.stored->number());
        const auto weights = scene.experts.weights(damage->local_expert_id);
        REQUIRE(scene.stored->reload_expert(damage->local_expert_id, weights, scene.progress).ok());
        ++num_mended;
      }
    }};
    explicit Mender(Scene& of) : scene(of) {}
    ~Mender() {
      scrubber.stop();
      thread.join();
    }
  };
};

TEST_CASE("the sum of an expert's pieces is that of its bytes in a file") {
  Scene scene;
  for (uint32_t id = 0; id < kNumExperts; ++id) {
    Checksum sum;
    for (const auto& piece : scene.packed->packed(id).pieces) sum.update(piece);
    const std::span<const std::byte> bytes(scene.content.data() + id * step_of(*scene.packed),
                                           scene.packed->panel_form()->num_bytes());
    CHECK(sum.finish() == scene.packed->packed(id).panels_sum);
    CHECK(checksum(bytes) == scene.packed->packed(id).panels_sum);
  }
}

TEST_CASE("mapped panels have the bits and the content of packed ones, and take no memory") {
  Scene scene;
  scene.map_all();
  CHECK(scene.stored->is_complete());
  CHECK(scene.stored->content().checksum == scene.packed->content().checksum);
  CHECK(scene.mapping->resident_bytes() == 0);
  for (uint16_t id = 0; id < kNumExperts; ++id)
    CHECK(replied(*scene.stored, {id}) == replied(*scene.packed, {id}));
  // The background reader sums up the rest.
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (scene.stored->has_unsummed() && !deadline.has_passed()) std::this_thread::yield();
  CHECK_FALSE(scene.stored->has_unsummed());
  // A session that comes later has them summed up again before it uses them.
  CHECK(scene.stored->are_packed_as_loaded(0, kNumExperts));
  CHECK(scene.stored->has_unsummed());
}

TEST_CASE(
    "a packed shard changes over to a file between calls, and every reply has the same bits") {
  for (int round = 0; round < 20; ++round) {
    Scene scene;
    const std::vector<float> right = replied(*scene.packed, {1});
    std::atomic<bool> is_over{false};
    std::thread caller([&] {
      while (!is_over.load()) CHECK(replied(*scene.packed, {1}) == right);
    });
    std::thread scrub([&] {
      while (!is_over.load())
        for (uint32_t id = 0; id < kNumExperts; ++id)
          CHECK(scene.packed->scrub_expert(id, is_over).ok());
    });
    const uint64_t before = scene.packing->resident_bytes();
    CHECK(before > 0);
    for (uint32_t id = 0; id < kNumExperts; ++id) {
      CHECK(scene.map(*scene.packing, scene.packed, id).ok());
      CHECK(scene.packing->resident_bytes() < before);
      nap_ns(200'000);
    }
    is_over = true;
    caller.join();
    scrub.join();
    CHECK(scene.packing->resident_bytes() == 0);
    for (uint32_t id = 0; id < kNumExperts; ++id) CHECK_FALSE(scene.packed->is_damaged(id));
  }
}

TEST_CASE("a loaded expert does not change over to another one's panels") {
  Scene scene;
  const ResidentShard::Packed one = scene.packed->packed(1);
  auto mapped = std::shared_ptr<MappedFile>(MappedFile::open(scene.file.path()).value());
  const auto map = [&](uint64_t offset, uint64_t content, uint32_t sum) {
    return scene.packed->map_expert(1, mapped, offset, content, sum);
  };
  CHECK(map(0, one.content_checksum + 1, one.panels_sum) ==
        Failed(ErrorCode::kInvalidArgument, "not the one that is in memory"));
  CHECK(map(0, one.content_checksum, one.panels_sum + 1) ==
        Failed(ErrorCode::kInvalidArgument, "not the one that is in memory"));
  CHECK(map(scene.content.size() - 64, one.content_checksum, one.panels_sum) ==
        Failed(ErrorCode::kCheckpoint, "beyond the end of the file"));
  CHECK(scene.packing->resident_bytes() > 0);
}

TEST_CASE("a byte that was flipped in the file is found before the first use, and packed again") {
  Scene scene;
  const uint64_t step = step_of(*scene.packed);
  // A panel of expert 1 and a bias of expert 2.
  for (const uint64_t at :
       {step + 100, 2 * step + scene.packed->panel_form()->num_bytes() - 4 * 32})
    scene.file.write(static_cast<off_t>(at), {scene.content[at] ^ std::byte{4}});
  scene.map_all();
  Scene::Mender mender(scene);
  for (uint16_t id = 0; id < kNumExperts; ++id)
    CHECK(replied(*scene.stored, {id}) == replied(*scene.packed, {id}));
  CHECK(mender.num_mended == 2);
}

TEST_CASE("without anybody who loads it again, a damaged expert is an error and never computed") {
  Scene scene;
  scene.file.write(100, {scene.content[100] ^ std::byte{4}});
  scene.map_all();
  std::vector<float> reply;
  CHECK(forward(*scene.stored, {0}, 1, reply) ==
        Failed(ErrorCode::kWorkerFailed, "local expert 0"));
}

TEST_CASE("a file of panels that is written or cut off under use changes no reply") {
  Scene scene;
  scene.map_all();
  Scene::Mender mender(scene);
  std::vector<std::vector<float>> right;
  for (uint16_t id = 0; id < kNumExperts; ++id) right.push_back(replied(*scene.packed, {id}));
  CHECK(replied(*scene.stored, {0}) == right[0]);
  scene.file.touch();
  CHECK(replied(*scene.stored, {0}) == right[0]);
  CHECK(mender.num_mended == 0);
  scene.file.write(100, {scene.content[100] ^ std::byte{4}});
  CHECK(replied(*scene.stored, {0}) == right[0]);
  scene.file.shorten(static_cast<off_t>(DirectFile::kBlockBytes));
  for (uint16_t id = 0; id < kNumExperts; ++id) CHECK(replied(*scene.stored, {id}) == right[id]);
  CHECK(mender.num_mended == kNumExperts);
}

TEST_CASE("while somebody changes the file all the time, each reply has the right bits") {
  Scene scene;
  scene.map_all();
  const std::vector<float> right = replied(*scene.packed, {1});
  const auto at = static_cast<off_t>(step_of(*scene.packed) + 400);
  std::atomic<bool> is_over{false};
  std::thread writer([&] {
    while (!is_over.load()) {
      scene.file.write(at, {scene.content[static_cast<size_t>(at)] ^ std::byte{4}});
      std::this_thread::yield();
      scene.file.write(at, {scene.content[static_cast<size_t>(at)]});
      nap_ns(300'000);
    }
  });
  {
    Scene::Mender mender(scene);
    for (int call = 0; call < 200; ++call) {
      std::vector<float> reply;
      if (forward(*scene.stored, {1}, 1, reply).ok()) CHECK(reply == right);
    }
  }
  is_over = true;
  writer.join();
}

}  // namespace
}  // namespace dflash::store

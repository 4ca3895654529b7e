// What a device step is lent: the paths of those whom it asks and no others. Who is lost or hangs
// in a step ends it, and the thread that watches says so by itself. Worker i holds shard i.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/puppet.h"
#include "client/step_watch.h"
#include "failed.h"

namespace dflash::client {
namespace {

constexpr int64_t kForever = 600'000'000'000;  // ns

SceneOptions three_workers() {
  SceneOptions options;
  options.num_workers = 3;
  options.has_pulses = true;
  options.client.stall_timeout_ns = 60'000'000'000;
  options.client.suspect_ns = 60'000'000'000;
  return options;
}

// Shard 1 is held by worker 1, and by worker 0 after it.
struct StepScene : PuppetScene {
  explicit StepScene(const SceneOptions& options = three_workers()) : PuppetScene(options) {
    REQUIRE(client.set_holders(kLayer, 1, {1, 0}).ok());
  }
  // Begins a step as the holder of the client, and ends it at once.
  StepLease lease() {
    REQUIRE(client.wait_until_fit(Deadline::after_ms(kPatienceMs)));
    auto begun = client.begin_step(4);
    REQUIRE_MESSAGE(begun.ok(), (begun.ok() ? "" : begun.error().message));
    return begun.value();
  }
  StepLease lease_and_end() {
    const StepLease begun = lease();
    end(begun);
    return begun;
  }
  void end(const StepLease& begun, bool has_failed = false) {
    StepResult result;
    result.has_failed = has_failed;
    for (const LeasedPath& path : begun.paths)
      result.used.push_back({path.ring.head, path.ring.tail});
    client.end_step(result);
  }
  // Judges the step until that ends it.
  Error judged() {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (!deadline.has_passed()) {
      if (Status one = client.judge_step(); !one.ok()) return std::move(one).error();
      std::this_thread::yield();
    }
    FAIL("the step goes on");
    return {};
  }
};

std::vector<uint32_t> workers(const StepLease& lease) {
  std::vector<uint32_t> all;
  for (const LeasedPath& path : lease.paths) all.push_back(path.worker);
  return all;
}

// Whom the step asks for each shard.
std::vector<uint32_t> asked(const StepLease& lease) {
  REQUIRE(lease.holders.size() == 1);
  std::vector<uint32_t> all;
  for (const uint32_t path : lease.holders[0].paths) all.push_back(lease.paths.at(path).worker);
  return all;
}

using Workers = std::vector<uint32_t>;

TEST_CASE("a step asks the first holder of each shard, and its number changes with the holders") {
  StepScene scene;
  const StepLease first = scene.lease_and_end(), second = scene.lease_and_end();
  CHECK(asked(first) == Workers{0, 1, 2});
  CHECK(first.holders_id == second.holders_id);
  CHECK(second.first_call == first.first_call + 4);

  scene.client.mark_lost(1, "its process ended");
  const StepLease without = scene.lease_and_end();
  CHECK(asked(without) == Workers{0, 0, 2});
  CHECK(workers(without) == Workers{0, 2});
  CHECK(without.holders_id != first.holders_id);

  REQUIRE(scene.replace(1).ok());
  CHECK(asked(scene.lease_and_end()) == Workers{0, 1, 2});
  REQUIRE(scene.client.set_holders(kLayer, 1, {2, 1}).ok());
  CHECK(asked(scene.lease_and_end()) == Workers{0, 2, 2});
}

TEST_CASE("a shard whose holders are all lost refuses the step and names them") {
  StepScene scene;
  scene.client.mark_lost(0, "hung up");
  scene.client.mark_lost(1, "hung up");
  const Error error = scene.client.begin_step(4).error();
  CHECK(error == Failed(ErrorCode::kWorkerLost, "worker w0 was lost: hung up"));
  const std::vector<WorkerReport> reports = scene.client.workers();
  CHECK(reports[2].path == PathState::kFresh);  // nothing was handed over
}

TEST_CASE("a worker that drains is asked only where nobody else holds the shard") {
  StepScene scene;
  REQUIRE(scene.client.set_admission(1, Admission::kDraining).ok());
  REQUIRE(scene.client.set_admission(2, Admission::kDraining).ok());
  CHECK(asked(scene.lease_and_end()) == Workers{0, 0, 2});
}

TEST_CASE("a worker that begins to drain in a step is idle once the step has ended") {
  StepScene scene;
  const auto is_told = [&scene] {
    for (const ClientEvent& event : scene.client.take_events()) {
      if (event.kind == EventKind::kIdle && event.worker == 1) return true;
    }
    return false;
  };
  const StepLease lease = scene.lease();
  REQUIRE(scene.client.set_admission(1, Admission::kDraining).ok());
  CHECK_FALSE(is_told());
  scene.end(lease);
  CHECK(is_told());
}

TEST_CASE("a path that is being renewed is waited for only where nobody else holds its shard") {
  StepScene scene;
  REQUIRE(scene.client.retire_path(1, "the test says so").ok());
  CHECK(asked(scene.lease_and_end()) == Workers{0, 0, 2});
  REQUIRE(scene.client.retire_path(2, "the test says so").ok());
  CHECK_FALSE(scene.client.wait_until_fit(Deadline::after_ms(30)));
  CHECK(scene.client.begin_step(4).error().message == Has{"is worn"});
  REQUIRE(scene.renew(2).ok());
  CHECK(asked(scene.lease_and_end()) == Workers{0, 0, 2});
}

TEST_CASE("slots that are too few for a worker's shards of a layer refuse the step") {
  SceneOptions options = three_workers();
  options.geometry.num_slots = 2;
  StepScene scene(options);
  REQUIRE(scene.client.set_holders(kLayer, 1, {0}).ok());
  CHECK(asked(scene.lease_and_end()) == Workers{0, 0, 2});
  REQUIRE(scene.client.set_holders(kLayer, 2, {0}).ok());
  const Error error = scene.client.begin_step(4).error();
  CHECK(error.code == ErrorCode::kUnsupported);
  CHECK(error.message.find("worker w0 has 2 slots") == 0);
  REQUIRE(scene.client.set_holders(kLayer, 2, {0, 2}).ok());
  CHECK(asked(scene.lease_and_end()) == Workers{0, 0, 2});
}

TEST_CASE("who is lost in a step ends it, who is not asked does not, and both come back in it") {
  StepScene scene;
  REQUIRE(scene.client.set_holders(kLayer, 1, {0}).ok());
  const StepLease lease = scene.lease();
  CHECK(workers(lease) == Workers{0, 2});
  scene.puppets[1].pulse.close();
  CHECK(scene.client.judge_step().ok());
  CHECK(scene.client.workers()[1].path == PathState::kLost);  // seen nevertheless
  REQUIRE(scene.replace(1).ok());
  CHECK(scene.client.judge_step().ok());

  scene.puppets[2].pulse.close();
  const Error error = scene.judged();
  CHECK(error.code == ErrorCode::kWorkerLost);
  CHECK(error.message.find("worker w2 was lost: hung up") == 0);
  CHECK(error.place.worker == "w2");
  REQUIRE(scene.replace(2).ok());
  CHECK(scene.judged().code == ErrorCode::kWorkerLost);  // the step's path is gone all the same
  scene.end(lease, true);
  const std::vector<WorkerReport> reports = scene.client.workers();
  CHECK(reports[0].path == PathState::kWorn);
  CHECK(reports[1].path == PathState::kFresh);
  CHECK(reports[2].path == PathState::kFresh);  // what the step did is not booked on its new path
}

TEST_CASE("a worker that shows no progress ends a step early where others hold its shards") {
  SceneOptions options = three_workers();
  options.client.suspect_ns = 20'000'000;
  StepScene scene(options);
  const StepLease lease = scene.lease();
  const Error error = scene.judged();
  CHECK(error.code == ErrorCode::kTimeout);
  CHECK(error.place.worker == "w1");  // the others have nobody in their place
  CHECK(error.message == Has{"others hold its experts"});
  CHECK(scene.client.workers()[1].standing == Standing::kSuspect);
  CHECK(scene.client.workers()[0].standing != Standing::kSuspect);
  scene.end(lease);

  const StepLease next = scene.lease();
  CHECK(asked(next) == Workers{0, 0, 2});
  const Deadline later = Deadline::after_ms(100);
  while (!later.has_passed()) CHECK(scene.client.judge_step().ok());
  scene.end(next);
  scene.puppets[1].send_pulse(7);  // it is well again, which the next step sees by itself
  CHECK(asked(scene.lease_and_end()) == Workers{0, 1, 2});
}

// Watches a step of the scene until it is stopped.
struct Watched {
  Watched(StepScene& scene, const StepLease& lease, int64_t limit_ns)
      : watch(std::shared_ptr<ExpertClient>(&scene.client, [](ExpertClient*) {}), lease, limit_ns,
              "too late", [this] { ++num_stops; }) {}
  Error reason() {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (num_stops == 0 && !deadline.has_passed()) std::this_thread::yield();
    REQUIRE(watch.reason().has_value());
    CHECK(num_stops == 1);
    return *watch.reason();
  }
  std::atomic<int> num_stops = 0;
  StepWatch watch;
};

TEST_CASE("the watch stops a step whose worker's process ends, without anybody who waits") {
  StepScene scene;
  const StepLease lease = scene.lease();
  Watched step(scene, lease, kForever);
  CHECK_FALSE(step.watch.reason().has_value());
  scene.puppets[2].pulse.close();
  CHECK(step.reason().message == "worker w2 was lost: hung up");
  scene.end(lease, true);
}

TEST_CASE("the watch stops a step whose worker is given up by somebody else") {
  StepScene scene;
  const StepLease lease = scene.lease();
  Watched step(scene, lease, kForever);
  scene.client.mark_lost(0, "said the supervisor");
  CHECK(step.reason().message == "worker w0 was lost: said the supervisor");
  scene.end(lease, true);
}

TEST_CASE("the watch stops a step at its deadline") {
  StepScene scene;
  const StepLease lease = scene.lease();
  Watched step(scene, lease, 20'000'000);
  const Error error = step.reason();
  CHECK(error.code == ErrorCode::kTimeout);
  CHECK(error.message == "too late");
  scene.end(lease, true);
}

TEST_CASE("a watch that ends stops nothing any more") {
  StepScene scene;
  std::atomic<int> num_stops = 0;
  for (int i = 0; i < 50; ++i) {
    const StepLease lease = scene.lease();
    {
      const std::shared_ptr<ExpertClient> client(&scene.client, [](ExpertClient*) {});
      const StepWatch watch(client, lease, kForever, "", [&] { ++num_stops; });
    }
    scene.end(lease);
  }
  CHECK(num_stops == 0);
}

}  // namespace
}  // namespace dflash::client

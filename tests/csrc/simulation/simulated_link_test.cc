// Data paths with a network in them: time, cuts, damage, and the rules that they watch.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/simulated_link.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"

namespace dflash::simulation {
namespace {

using transport::Side;

constexpr transport::SlotGeometry kGeometry{3, 256, 256};

struct Scene {
  explicit Scene(bool is_stream) {
    link =
        SimulatedLink::create({scheduler, journal, Random(1), network, counts, replied_ns, 0,
                               [this](std::string what) { violations.push_back(std::move(what)); },
                               [](std::span<const std::byte>) {}},
                              kGeometry, 7, is_stream)
            .value();
    host = link->end(Side::kHost);
    worker = link->end(Side::kWorker);
  }
  ~Scene() {
    host.reset();
    worker.reset();
    link.reset();
    scheduler.drop_events();
  }
  void pass(int64_t ns) {
    const int64_t until = scheduler.now_ns() + ns;
    scheduler.at(until, [] {});
    scheduler.run([&] { return scheduler.now_ns() >= until; });
  }
  static void publish(transport::Channel& channel, uint32_t slot, const std::string& text) {
    std::memcpy(channel.outgoing(slot).data(), text.data(), text.size());
    REQUIRE(channel.publish(slot, text.size()).ok());
  }
  // What has come, empty where nothing has.
  static std::string take(transport::Channel& channel) {
    auto polled = channel.poll();
    REQUIRE(polled.ok());
    if (!polled.value()) return "";
    const auto bytes = polled.value()->bytes;
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  Scheduler scheduler;
  Journal journal;
  Network network;
  LinkCounts counts;
  int64_t replied_ns = 0;
  std::vector<std::string> violations;
  std::shared_ptr<SimulatedLink> link;
  std::unique_ptr<transport::Channel> host, worker;
};

TEST_CASE("a message comes after its delay, on rings and on sockets") {
  for (const bool is_stream : {false, true}) {
    Scene scene(is_stream);
    scene.network.delay_ns = 1000;
    Scene::publish(*scene.host, 1, "question");
    scene.pass(999);
    CHECK(Scene::take(*scene.worker).empty());
    scene.pass(2);
    CHECK(Scene::take(*scene.worker) == "question");
    CHECK(scene.counts.num_requests == 1);
    CHECK(scene.counts.request_bytes == 8);
  }
}

TEST_CASE("a network that is cut in one direction holds back what goes there, and nothing else") {
  Scene scene(true);
  scene.network.cut_until_ns[static_cast<size_t>(Side::kHost)] = scene.scheduler.now_ns() + 5000;
  Scene::publish(*scene.host, 0, "late");
  Scene::publish(*scene.worker, 1, "soon");
  scene.pass(4000);
  CHECK(Scene::take(*scene.host) == "soon");
  CHECK(Scene::take(*scene.worker).empty());
  scene.pass(2000);
  CHECK(Scene::take(*scene.worker) == "late");
}

TEST_CASE("a slot that is used again before its reply is a violation, and after it is none") {
  Scene scene(false);
  Scene::publish(*scene.host, 0, "first");
  scene.pass(1);
  Scene::publish(*scene.worker, 0, "reply");
  scene.pass(1);
  CHECK(Scene::take(*scene.host) == "reply");
  Scene::publish(*scene.host, 0, "second");
  CHECK(scene.violations.empty());
  Scene::publish(*scene.host, 0, "third");
  CHECK(scene.violations.size() == 1);
}

TEST_CASE("whoever goes on after a message that had to be refused breaks a rule") {
  Scene scene(true);
  Scene::publish(*scene.host, 0, "question");
  scene.pass(1);
  scene.link->damage_next(Side::kWorker, SimulatedFault::kTruncate);
  Scene::publish(*scene.worker, 0, "answer");
  scene.pass(1);
  CHECK(Scene::take(*scene.host) != "answer");
  CHECK(scene.violations.empty());
  static_cast<void>(scene.host->poll());
  CHECK(scene.violations.size() == 1);
}

TEST_CASE("what a killed worker sent may still come; what it does afterwards does not") {
  for (const bool keeps_sent : {true, false}) {
    Scene scene(false);
    scene.network.delay_ns = 100;
    Scene::publish(*scene.worker, 0, "before");
    scene.link->kill_worker(keeps_sent);
    Scene::publish(*scene.worker, 1, "after");
    CHECK(!scene.worker->poll().ok());
    scene.pass(200);
    CHECK(Scene::take(*scene.host) == (keeps_sent ? "before" : ""));
    CHECK(Scene::take(*scene.host).empty());
  }
}

TEST_CASE("an end that closes is heard of after what it sent") {
  Scene scene(true);
  scene.network.delay_ns = 100;
  Scene::publish(*scene.worker, 0, "last");
  scene.worker.reset();
  scene.pass(300);
  CHECK(Scene::take(*scene.host) == "last");
  CHECK(!scene.host->poll().ok());
}

}  // namespace
}  // namespace dflash::simulation

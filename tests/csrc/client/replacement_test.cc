// A lost worker is taken back: with a fresh path and fresh pulses it is called again, and nothing
// that belongs to the lost path passes for an answer.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "client/puppet.h"

namespace dflash::client {
namespace {

TEST_CASE("a lost worker that is replaced serves calls again, and its counters go on") {
  PuppetScene scene;
  REQUIRE(scene.works(1));
  scene.client.mark_lost(1, "its process ended");
  Tokens refused{{2}};
  REQUIRE(scene.client.submit(refused.batch(), 3).error().code == ErrorCode::kWorkerLost);

  REQUIRE(scene.replace(1).ok());
  const WorkerReport report = scene.client.workers()[1];
  CHECK(report.path == PathState::kFresh);
  CHECK(report.reason.empty());
  CHECK(report.generation == kGeneration + 1);
  CHECK(scene.works(1));
  CHECK(scene.counters(1).rows == 2);
  CHECK(scene.client.workers()[0].generation == kGeneration);
}

TEST_CASE("only a lost worker is replaced, and never under the generation that was lost") {
  PuppetScene scene;
  CHECK(scene.replace(1).error().message ==
        "worker w1 cannot be replaced: it is not lost; renew its data path, or mark it lost first");
  CHECK(scene.works(1));
  scene.client.mark_lost(1, "gone");
  CHECK(scene.replace(1, kGeneration).error().code == ErrorCode::kInvalidArgument);
  CHECK(scene.client.replace_worker(1, {nullptr, kGeneration + 1}, OwnedFd()).error().code ==
        ErrorCode::kInvalidArgument);
  auto pair = transport::make_loopback({3, 4096, 4096}).value();
  CHECK(scene.client.replace_worker(7, {std::move(pair.host), 9}, OwnedFd()).error().code ==
        ErrorCode::kInvalidArgument);
  CHECK(scene.replace(1).ok());
}

TEST_CASE("a late reply on the lost path reaches nobody, and one on the fresh path is a lie") {
  PuppetScene scene;
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const Message request = scene.puppets[1].take();
  scene.client.mark_lost(1, "hung up");
  CHECK(scene.finish(call).error().code == ErrorCode::kWorkerLost);

  std::unique_ptr<transport::Channel> former;
  REQUIRE(scene.replace(1, kGeneration + 1, &former).ok());
  const auto late = echo(request).bytes();
  std::copy(late.begin(), late.end(), former->outgoing(request.slot).begin());
  static_cast<void>(former->publish(request.slot, late.size()));  // nobody may be there any more
  CHECK(scene.works(1));
  CHECK(tokens.is_untouched());

  Tokens more{{2}};
  const CallPtr asked = scene.submit(more);
  const Message fresh = scene.puppets[1].take();
  scene.puppets[1].send(fresh.slot, late);  // of the generation that was lost
  CHECK(scene.finish(asked).error().code == ErrorCode::kProtocol);
  CHECK(more.is_untouched());
  REQUIRE(scene.replace(1, kGeneration + 2).ok());
  CHECK(scene.works(1));
}

TEST_CASE("the fresh pulses judge the worker, the former ones do not") {
  SceneOptions options;
  options.has_pulses = true;
  PuppetScene scene(options);
  scene.puppets[1].pulse.close();
  Tokens tokens{{2}};
  auto submitted = scene.client.submit(tokens.batch(), 3);
  if (submitted.ok()) CHECK(scene.finish(submitted.value()).error().code == ErrorCode::kWorkerLost);
  REQUIRE(scene.client.workers()[1].path == PathState::kLost);
  REQUIRE(scene.replace(1).ok());
  scene.puppets[1].send_pulse(1);
  CHECK(scene.works(1));

  Tokens again{{2}};
  const CallPtr call = scene.submit(again);
  scene.puppets[1].pulse.close();
  CHECK(scene.finish(call).error().message ==
        "worker w1 was lost: hung up (layer model.layers.3.mlp.experts)");
}

TEST_CASE("threads that submit while a worker is lost and replaced get a result or its loss") {
  PuppetScene scene;
  std::atomic<bool> is_over = false;
  std::atomic<int> num_right = 0, num_lost = 0, num_wrong = 0;
  std::vector<std::thread> callers;
  for (int t = 0; t < 2; ++t) {
    callers.emplace_back([&] {
      while (!is_over) {
        Tokens tokens{{2}};
        auto call = scene.client.submit(tokens.batch(), 3);
        Status outcome = ok();
        if (call.ok()) {
          scene.client.wait(call.value(), Deadline::after_ms(kPatienceMs));
          outcome = scene.client.outcome(call.value());
        } else {
          outcome = call.error();
        }
        if (outcome.ok()) {
          ++(tokens.is_right() ? num_right : num_wrong);
        } else {
          ++(outcome.error().code == ErrorCode::kWorkerLost ? num_lost : num_wrong);
        }
      }
    });
  }
  const Deadline patience = Deadline::after_ms(kPatienceMs);
  for (uint64_t round = 1; round <= 5; ++round) {
    const int right_before = num_right, lost_before = num_lost;
    while (num_right < right_before + 3 && !patience.has_passed()) {
      if (auto request = scene.puppets[1].try_take()) scene.puppets[1].send(echo(*request));
    }
    scene.client.mark_lost(1, "killed");
    while (num_lost == lost_before && !patience.has_passed()) std::this_thread::yield();
    REQUIRE(scene.replace(1, kGeneration + round).ok());
  }
  is_over = true;
  scene.client.mark_lost(1, "the test is over");
  for (std::thread& caller : callers) caller.join();
  CHECK(num_wrong == 0);
  CHECK(num_right >= 15);
  CHECK(num_lost >= 5);
}

}  // namespace
}  // namespace dflash::client

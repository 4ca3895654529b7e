// What a client counts as under way survives every way a call can end: a chunk that has its worker
// to itself is recorded as such.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "client/puppet.h"
#include "failed.h"

namespace dflash::client {
namespace {

// Chunks of worker 1 that were recorded as measured: those that had the worker to themselves and a
// prediction.
uint32_t num_measured(const PuppetScene& scene) {
  uint32_t sum = 0;
  // named: a loop's temporary would end before it
  const WorkerForecast forecast = scene.client.forecasts()[1];
  for (const ChunkRecord& chunk : forecast.chunks) sum += chunk.num_measured;
  return sum;
}

SceneOptions measured(int64_t timeout_ms = 30'000) {
  SceneOptions options;
  options.policy = {64, 2, true};
  options.client.call_timeout_ns = timeout_ms * 1'000'000;
  return options;
}

// The first call teaches the model, so that the second has a prediction.
void warm_up(PuppetScene& scene) {
  REQUIRE(scene.works(1));
  REQUIRE(scene.works(1));
  REQUIRE(num_measured(scene) == 1);
}

TEST_CASE("an abandoned call, answered late, leaves nothing under way") {
  PuppetScene scene(measured());
  warm_up(scene);
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const Message request = scene.puppets[1].take();
  scene.client.abandon(call);
  scene.puppets[1].send(echo(request));
  CHECK(scene.works(1));
  CHECK(num_measured(scene) == 2);
}

TEST_CASE("a refused call leaves nothing under way") {
  PuppetScene scene(measured());
  warm_up(scene);
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  scene.puppets[1].send(refusal(scene.puppets[1].take(), Error{ErrorCode::kRange, "too large"}));
  CHECK(!scene.finish(call).ok());
  CHECK(scene.works(1));
  CHECK(num_measured(scene) == 2);
}

TEST_CASE(
    "a call that timed out at one worker leaves nothing under way at the other, which had "
    "answered") {
  PuppetScene scene(measured(100));
  warm_up(scene);
  Tokens tokens{{0}, {2}};
  const CallPtr call = scene.submit(tokens);
  scene.serve(1);
  CHECK(scene.finish(call) == Failed(ErrorCode::kTimeout));
  const uint32_t before = num_measured(scene);
  CHECK(scene.works(1));
  CHECK(num_measured(scene) == before + 1);
}

TEST_CASE("a worker that never gives a late reply back is still measured") {
  PuppetScene scene(measured());
  Tokens tokens{{2}};
  // the first call of all: one of two slots stays in quarantine
  scene.client.abandon(scene.submit(tokens));
  static_cast<void>(scene.puppets[1].take());
  for (int i = 0; i < 3; ++i) REQUIRE(scene.works(1));
  CHECK(num_measured(scene) == 2);
}

}  // namespace
}  // namespace dflash::client

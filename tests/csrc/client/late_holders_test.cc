// A holder that is alive and slow: what waits behind it goes to another one, and what it does not
// answer in a call's time is asked of another one, so that no call fails while a holder is well.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "client/call.h"
#include "client/replicated.h"
#include "failed.h"

namespace dflash::client {
namespace {

SceneOptions with_timeout(int64_t call_timeout_ns, bool has_pulses = false) {
  SceneOptions options = quick(has_pulses);
  options.client.call_timeout_ns = call_timeout_ns;
  return options;
}

// Makes calls so that the model of worker 1 predicts something.
void teach(Replicated& scene) {
  Tokens one{{2}};
  for (int i = 0; i < 30; ++i) {
    REQUIRE(scene.call(one, 1).ok());
  }
}

TEST_CASE("a slice that is not answered in its call's time is asked of another holder") {
  Replicated scene(with_timeout(500'000'000));
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const Message late = scene.puppets[1].take();
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (!scene.client.wait(call, Deadline::after_ms(1)) && !deadline.has_passed()) {
    if (auto request = scene.puppets[0].try_take()) {
      CHECK(request->header.attempt == 1);
      scene.puppets[0].send(echo(*request));
    }
  }
  REQUIRE(scene.finish(call).ok());
  CHECK(tokens.is_right());
  CHECK(scene.counters(1).failovers == 1);
  CHECK(scene.counters(0).hedges == 0);
  // Its slot stays withheld until its very reply has come, and others are asked until then.
  CHECK(scene.client.workers()[1].quarantined_slots == 1);
  const CallPtr next = scene.submit(tokens);
  scene.puppets[1].send(echo(late));
  scene.serve(0);
  REQUIRE(scene.finish(next).ok());
  CHECK(scene.client.workers()[1].quarantined_slots == 0);
  CHECK(scene.counters(1).superseded == 1);
  CHECK(scene.call(tokens, 1).ok());
}

TEST_CASE("every holder gets a call's time once, and the error names all of them") {
  Replicated scene(with_timeout(150'000'000));
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  CHECK(scene.finish(call) ==
        Failed(ErrorCode::kTimeout, "worker w0 did not answer", "worker w1 did not answer"));
  CHECK(call->ended_ns - call->submitted_ns >= 300'000'000);
  CHECK(tokens.is_untouched());
  for (Puppet& puppet : scene.puppets) {
    CHECK(puppet.try_take());
    CHECK(!puppet.try_take());
  }
}

TEST_CASE("a slice that only waited at a call's deadline goes to another holder too") {
  SceneOptions options = with_timeout(500'000'000);
  options.policy = {1, 1};
  Replicated scene(options);
  Tokens tokens{{2}, {3}, {2}};  // one under way at worker 1, two wait there
  const CallPtr call = scene.submit(tokens);
  REQUIRE(scene.finish_by(0, call).ok());
  CHECK(tokens.is_right());
  CHECK(scene.counters(1).failovers == 1);
  CHECK(scene.counters(0).calls == 3);
}

TEST_CASE(
    "two holders that owe each other's shards wear out both paths, and the call waits for them") {
  SceneOptions options = with_timeout(500'000'000);
  options.geometry.num_slots = 2;
  options.policy = {64, 1};
  Replicated scene(options);
  REQUIRE(scene.client.set_holders(kLayer, 0, {0, 1}).ok());
  Tokens tokens{{2}, {0}};
  const CallPtr call = scene.submit(tokens);
  for (Puppet& puppet : scene.puppets) puppet.take();  // what nobody answers
  int num_renewed = 0;
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (!scene.client.wait(call, Deadline::after_ms(1)) && !deadline.has_passed()) {
    for (const WornPath& worn : scene.client.retire_worn_paths()) {
      REQUIRE(scene.renew(worn.worker, options.geometry).ok());
      ++num_renewed;
    }
    for (Puppet& puppet : scene.puppets) {
      if (auto request = puppet.try_take()) puppet.send(echo(*request));
    }
  }
  REQUIRE(scene.finish(call).ok());
  CHECK(tokens.is_right());
  CHECK(num_renewed >= 1);
}

TEST_CASE("a call ends at its deadline where one of its shards has nobody else") {
  Replicated scene(with_timeout(150'000'000));
  Tokens tokens{{2}, {0}};  // shard 0 is held by worker 0 alone
  const CallPtr call = scene.submit(tokens);
  CHECK(scene.finish(call) == Failed(ErrorCode::kTimeout));
  CHECK(scene.puppets[0].try_take());
  CHECK(!scene.puppets[0].try_take());
}

TEST_CASE("a call's deadline comes before the grace in which the last resort is not asked") {
  SceneOptions options = with_timeout(500'000'000);
  options.last_resort = 0;
  options.client.reconnect_grace_ns = options.client.park_ns = 30'000'000'000;
  Replicated scene(options);
  REQUIRE(scene.client.set_remedy(1, true).ok());
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  scene.client.mark_lost(1, "gone for a moment");
  REQUIRE(scene.finish_by(0, call).ok());
  CHECK(tokens.is_right());
  CHECK(scene.counters(1).parked_ns > 0);
}

TEST_CASE("the last resort is asked when parking ends, where the grace would be longer") {
  for (const int64_t park_ns : {int64_t{0}, int64_t{100'000'000}}) {
    // A call that comes after the loss is parked uncut; one that was under way, slice by slice.
    for (const bool is_under_way : {false, true}) {
      SceneOptions options = with_timeout(30'000'000'000);
      options.last_resort = 0;
      options.client.park_ns = park_ns;
      options.client.reconnect_grace_ns = 30'000'000'000;
      Replicated scene(options);
      REQUIRE(scene.client.set_remedy(1, true).ok());
      if (!is_under_way) scene.client.mark_lost(1, "gone for a moment");
      Tokens tokens{{2}};
      const CallPtr call = scene.submit(tokens);
      if (is_under_way) scene.client.mark_lost(1, "gone for a moment");
      REQUIRE(scene.finish_by(0, call).ok());
      CHECK(tokens.is_right());
    }
  }
}

TEST_CASE("a holder that was asked shortly before the deadline gets its time") {
  SceneOptions options = with_timeout(1'000'000'000, true);
  options.client.suspect_ns = 700'000'000;
  Replicated scene(options);
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const Message second = scene.taken_by_0(call);
  for (uint64_t counter = 1'000; now_ns() < call->submitted_ns + 1'200'000'000; ++counter) {
    scene.puppets[0].send_pulse(counter);
    CHECK(!scene.client.wait(call, Deadline::after_ms(5)));
  }
  scene.puppets[0].send(echo(second));
  CHECK(scene.finish(call).ok());
  CHECK(tokens.is_right());
}

TEST_CASE("slices that wait behind a late one go to another holder without a second request") {
  SceneOptions options = quick();
  options.policy = {1, 1};
  Replicated scene(options);
  teach(scene);
  Tokens tokens{{2}, {3}, {2}};
  const uint64_t before = scene.counters(1).calls;
  const CallPtr call = scene.submit(tokens);
  const Message late = scene.puppets[1].take();
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  for (int served = 0; served < 2;) {
    REQUIRE(!deadline.has_passed());
    CHECK(!scene.client.wait(call, Deadline::after_ms(1)));
    auto request = scene.puppets[0].try_take();
    if (!request) continue;
    scene.puppets[0].send(echo(*request));
    ++served;
  }
  scene.puppets[1].send(echo(late));
  CHECK(scene.finish(call).ok());
  CHECK(tokens.is_right());
  CHECK(scene.counters(1).calls == before + 1);
  CHECK(scene.counters(0).calls == 2);
  CHECK(scene.counters(0).hedges == 0);
}

TEST_CASE("a late slice is asked of another holder once that one is rid of its queue") {
  SceneOptions options = with_timeout(30'000'000'000);
  options.policy = {1, 1};
  options.client.hedge_share = 0.5;
  Replicated scene(options);
  teach(scene);
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  scene.puppets[1].take();  // and never answered
  Tokens busy{{0}, {0}};    // worker 0 alone holds shard 0: one slice under way, one waits
  const CallPtr other = scene.submit(busy);
  // Worker 1 is late meanwhile.
  CHECK(!scene.client.wait(call, Deadline::after_ms(50)));
  for (int slice = 0; slice < 2; ++slice) {
    scene.serve(0);
    static_cast<void>(scene.client.wait(call, Deadline::after_ms(5)));
  }
  REQUIRE(scene.finish(other).ok());
  REQUIRE(scene.finish_by(0, call).ok());
  CHECK(tokens.is_right());
  CHECK(scene.counters(0).hedges == 1);
}

TEST_CASE("a worker gets nothing new before it has answered what another one answered for it") {
  SceneOptions options = quick();
  options.client.hedge_share = 1;
  Replicated scene(options);
  teach(scene);
  Tokens tokens{{2}}, next{{3}};
  const CallPtr call = scene.submit(tokens);
  const Message late = scene.puppets[1].take();
  REQUIRE(scene.finish_by(0, call).ok());
  CHECK(scene.counters(0).hedges_won == 1);
  const CallPtr second = scene.submit(next);
  scene.puppets[1].send(echo(late));
  scene.serve(0);
  CHECK(scene.finish(second).ok());
  CHECK(scene.call(tokens, 1).ok());
}

TEST_CASE("a worker that never gives the answer which another one gave for it is lost") {
  // As behind a cut link: it is asked for nothing new, so that only this answer is missed.
  SceneOptions options = quick(true);
  options.client.hedge_share = 1;
  options.client.stall_timeout_ns = 1'000'000'000;
  Replicated scene(options);
  teach(scene);
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  static_cast<void>(scene.puppets[1].take());
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  uint64_t counter = 0;
  const auto serve_by_0 = [&](const CallPtr& one) {
    while (!scene.client.wait(one, Deadline::after_ms(1)) && !deadline.has_passed()) {
      scene.puppets[0].send_pulse(++counter);
      if (auto request = scene.puppets[0].try_take()) scene.puppets[0].send(echo(*request));
    }
    REQUIRE(scene.finish(one).ok());
  };
  serve_by_0(call);
  while (scene.client.workers()[1].path != PathState::kLost && !deadline.has_passed())
    serve_by_0(scene.submit(tokens));
  CHECK(scene.client.workers()[1].path == PathState::kLost);
  CHECK(scene.client.workers()[1].reason == Has{"no progress for"});
  CHECK(scene.client.workers()[0].path == PathState::kInUse);
}

}  // namespace
}  // namespace dflash::client

// Several holders of one shard: who is asked, who is asked instead, and that nobody above notices.
// Worker 1 holds shard 1 as in every scene; worker 0 holds it too where a test says so. An honest
// puppet echoes rows, so both give the same bits.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "client/replicated.h"
#include "failed.h"

namespace dflash::client {
namespace {

TEST_CASE("without a fault, the first holder gets every slice") {
  Replicated scene;
  for (int i = 0; i < 5; ++i) {
    Tokens tokens{{2}};
    REQUIRE(scene.call(tokens, 1).ok());
    CHECK(tokens.is_right());
  }
  CHECK(scene.counters(1).calls == 5);
  CHECK(scene.counters(0).calls == 0);
}

TEST_CASE("what a killed worker owed is answered by another holder, and no call fails") {
  Replicated scene(quick(true));
  Tokens tokens{{2}, {0}};
  const CallPtr call = scene.submit(tokens);
  const Message first = scene.puppets[1].take();
  CHECK(first.header.attempt == 0);
  scene.puppets[1].pulse.close();  // as the kernel does for a killed process
  CHECK(scene.finish_by(0, call).ok());
  CHECK(tokens.is_right());
  CHECK(scene.counters(1).failovers == 1);
  CHECK(kinds(scene.client.take_events()) == std::vector{EventKind::kLost});
}

TEST_CASE("an attempt has a number, and a reply to another attempt is a lie") {
  for (const bool lies : {false, true}) {
    CAPTURE(lies);
    Replicated scene;
    Tokens tokens{{2}};
    const CallPtr call = scene.submit(tokens);
    static_cast<void>(scene.puppets[1].take());
    scene.client.mark_lost(1, "its process ended");
    Message second = scene.puppets[0].take();
    CHECK(second.header.attempt == 1);
    if (lies) second.header.attempt = 0;
    scene.puppets[0].send(echo(second));
    const Status outcome = scene.finish(call);
    CHECK(outcome.ok() == !lies);
    if (lies) {
      CHECK(outcome.error().code == ErrorCode::kProtocol);
      // Both that were tried are named, and how each failed.
      CHECK(outcome.error().message == Has{"worker w0"});
      CHECK(outcome.error().message == Has{"its process ended"});
      CHECK(tokens.is_untouched());
    }
  }
}

TEST_CASE("slices that only waited at a lost worker move too") {
  SceneOptions options = quick();
  options.policy = {1, 2};  // a slice for each token, two in flight
  Replicated scene(options);
  Tokens tokens{{2}, {2}, {3}, {2}, {3}, {3}};
  const CallPtr call = scene.submit(tokens);
  scene.client.mark_lost(1, "gone");
  for (int i = 0; i < 6; ++i) {
    static_cast<void>(scene.client.is_done(call));
    scene.serve(0);
  }
  CHECK(scene.finish(call).ok());
  CHECK(tokens.is_right());
  CHECK(scene.counters(1).failovers == 2);  // those under way; the others had cost nothing yet
}

TEST_CASE("a slice without a usable holder waits for one that is on its way back") {
  Replicated scene;
  REQUIRE(scene.client.set_holders(kLayer, kShard, {1}).ok());
  REQUIRE(scene.client.set_remedy(1, true).ok());
  Tokens tokens{{2}}, late{{3}};
  const CallPtr call = scene.submit(tokens);
  static_cast<void>(scene.puppets[1].take());
  scene.client.mark_lost(1, "gone");
  CHECK(!scene.client.wait(call, Deadline::after_ms(30)));
  const CallPtr submitted_while_lost = scene.submit(late);
  CHECK(!scene.client.wait(submitted_while_lost, Deadline::after_ms(5)));

  REQUIRE(scene.replace(1).ok());
  scene.serve(1);
  scene.serve(1);
  CHECK(scene.finish(call).ok());
  CHECK(scene.finish(submitted_while_lost).ok());
  CHECK(tokens.is_right());
  CHECK(late.is_right());
  CHECK(scene.counters(1).parked_ns > 0);
}

TEST_CASE("waiting for a holder ends after park_ns with the error, and at once without a remedy") {
  SceneOptions options = quick();
  options.client.park_ns = 40'000'000;
  PuppetScene scene(options);
  REQUIRE(scene.client.set_remedy(1, true).ok());
  Tokens tokens{{2}}, other{{2}};
  const CallPtr call = scene.submit(tokens);
  scene.client.mark_lost(1, "gone for now");
  const CallPtr parked = scene.submit(other);
  for (const CallPtr& one : {call, parked}) {
    CHECK(scene.finish(one) == Failed(ErrorCode::kWorkerLost, "gone for now"));
  }
  REQUIRE(scene.client.set_remedy(1, false).ok());
  CHECK(scene.client.submit(tokens.batch(), kLayer) == Failed(ErrorCode::kWorkerLost));
}

TEST_CASE("a remedy that is called off ends what waits for it") {
  PuppetScene scene(quick());
  REQUIRE(scene.client.set_remedy(1, true).ok());
  Tokens tokens{{2}}, other{{3}};
  const CallPtr call = scene.submit(tokens);
  scene.client.mark_lost(1, "gone");
  const CallPtr parked = scene.submit(other);
  REQUIRE(scene.client.set_remedy(1, false).ok());
  CHECK(scene.client.is_done(call));
  CHECK(scene.client.is_done(parked));
  CHECK(scene.client.outcome(call).error().code == ErrorCode::kWorkerLost);
  CHECK(scene.client.outcome(parked).error().code == ErrorCode::kWorkerLost);
}

TEST_CASE("a refusal is a failed attempt, and only numbers out of range are the caller's fault") {
  for (const ErrorCode code : {ErrorCode::kWorkerFailed, ErrorCode::kRange}) {
    Replicated scene;
    Tokens tokens{{2}};
    const CallPtr call = scene.submit(tokens);
    scene.puppets[1].send(refusal(scene.puppets[1].take(), Error{code, "no"}));
    if (code == ErrorCode::kRange) {
      CHECK(scene.finish(call).error().code == ErrorCode::kRange);
      continue;
    }
    CHECK(scene.finish_by(0, call).ok());
    CHECK(tokens.is_right());
    CHECK(scene.counters(1).failovers == 1);
  }
}

TEST_CASE(
    "a slice that one holder refused waits for another whose path is renewed, or who is brought "
    "back") {
  for (const bool is_lost : {false, true}) {
    CAPTURE(is_lost);
    Replicated scene(quick(true));
    REQUIRE(scene.client.set_remedy(0, true).ok());
    Tokens tokens{{2}};
    const CallPtr call = scene.submit(tokens);
    if (is_lost) {
      scene.client.mark_lost(0, "its process ended");
    } else {
      REQUIRE(scene.client.retire_path(0, "a test").ok());
    }
    scene.puppets[1].send(refusal(scene.puppets[1].take(), Error{ErrorCode::kWorkerFailed, "no"}));
    CHECK(!scene.client.wait(call, Deadline::after_ms(30)));
    if (is_lost) {
      REQUIRE(scene.replace(0).ok());
    } else {
      REQUIRE(scene.renew(0).ok());
    }
    CHECK(scene.finish_by(0, call).ok());
    CHECK(tokens.is_right());
  }
}

TEST_CASE("when all holders refuse, the error names each of them") {
  Replicated scene;
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  scene.puppets[1].send(refusal(scene.puppets[1].take(), Error{ErrorCode::kWorkerFailed, "full"}));
  CHECK(!scene.client.wait(call, Deadline::after_ms(30)));
  scene.puppets[0].send(refusal(scene.puppets[0].take(), Error{ErrorCode::kWorkerFailed, "empty"}));
  const Status outcome = scene.finish(call);
  CHECK(outcome == Failed(ErrorCode::kWorkerFailed, "empty", "full"));
}

TEST_CASE("what a suspected worker owes is asked of another one, and the first answer counts") {
  for (const bool first_wins : {false, true}) {
    CAPTURE(first_wins);
    SceneOptions options = quick(true);
    options.client.suspect_ns = 30'000'000;
    Replicated scene(options);
    Tokens tokens{{2}};
    const CallPtr call = scene.submit(tokens);
    const Message first = scene.puppets[1].take();
    const Message second = scene.taken_by_0(call);
    CHECK(second.header.attempt == 1);
    CHECK(kinds(scene.client.take_events()) == std::vector{EventKind::kSuspect});
    CHECK(scene.client.workers()[1].standing == Standing::kSuspect);
    if (first_wins) {
      scene.puppets[1].send(echo(first));
    } else {
      scene.puppets[0].send(echo(second));
    }
    CHECK(scene.finish(call).ok());
    CHECK(tokens.is_right());
    // The other slot stays withheld until its very reply has come.
    const uint32_t behind = first_wins ? 0 : 1;
    CHECK(scene.client.workers()[behind].quarantined_slots == 1);
    scene.puppets[behind].send(echo(first_wins ? second : first));
    Tokens next{{0}};
    CHECK(scene.call(next, 0).ok());
    CHECK(scene.client.workers()[behind].quarantined_slots == 0);
    CHECK(scene.counters(behind).superseded == 1);
    CHECK(scene.counters(0).hedges == 1);
    CHECK(scene.counters(0).hedges_won == (first_wins ? 0 : 1));
    // `calls` counts what the plan asks for: one for shard 1, one for shard 0.
    CHECK(scene.counters(1).calls == 1);
    CHECK(scene.counters(0).calls == 1);
  }
}

TEST_CASE("a slice whose second holder is lost may be asked of another one again") {
  SceneOptions options = quick(true);
  options.client.suspect_ns = 30'000'000;
  options.num_workers = 3;
  PuppetScene scene(options);
  REQUIRE(scene.client.set_holders(kLayer, kShard, {1, 0, 2}).ok());
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  static_cast<void>(scene.puppets[1].take());
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  std::optional<Message> asked;
  for (uint64_t counter = 1; !asked && !deadline.has_passed(); ++counter) {
    for (const size_t worker : {0u, 2u}) scene.puppets[worker].send_pulse(counter);
    static_cast<void>(scene.client.wait(call, Deadline::after_ms(5)));
    asked = scene.puppets[0].try_take();
  }
  REQUIRE(asked);
  scene.client.mark_lost(0, "gone");
  asked.reset();
  for (uint64_t counter = 1'000'000; !asked && !deadline.has_passed(); ++counter) {
    scene.puppets[2].send_pulse(counter);
    static_cast<void>(scene.client.wait(call, Deadline::after_ms(5)));
    asked = scene.puppets[2].try_take();
  }
  REQUIRE(asked);
  CHECK(asked->header.attempt == 2);
  scene.puppets[2].send(echo(*asked));
  CHECK(scene.finish(call).ok());
  CHECK(tokens.is_right());
}

TEST_CASE("a suspected worker is not asked again until it shows progress") {
  SceneOptions options = quick(true);
  options.client.suspect_ns = 30'000'000;
  Replicated scene(options);
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const Message first = scene.puppets[1].take();
  scene.puppets[0].send(echo(scene.taken_by_0(call)));
  REQUIRE(scene.finish(call).ok());
  scene.puppets[1].send(echo(first));
  Tokens idle{{0}};
  REQUIRE(scene.call(idle, 0).ok());
  REQUIRE(scene.client.workers()[1].quarantined_slots == 0);

  const CallPtr second = scene.submit(tokens);  // nothing is owed by worker 1 any more
  scene.serve(0);
  REQUIRE(scene.finish(second).ok());
  CHECK(!scene.puppets[1].try_take());

  scene.puppets[1].send_pulse(77);
  while (scene.client.workers()[1].standing == Standing::kSuspect) {
    const CallPtr other = scene.submit(idle);
    CHECK(!scene.client.wait(other, Deadline::after_ms(25)));
    scene.serve(0);
    REQUIRE(scene.finish(other).ok());
  }
  CHECK(scene.call(tokens, 1).ok());
}

TEST_CASE("a worker that was idle is not judged by what it did before slices moved to it") {
  SceneOptions options = quick(true);
  // Worker 1 never pulses, and its six answers take 5 ms each and more: far less than this.
  options.client.suspect_ns = 400'000'000;
  options.client.stall_timeout_ns = 10'000'000'000;
  options.policy = {1, 2};  // a slice for each token, two in flight
  Replicated scene(options);
  REQUIRE(scene.client.set_holders(kLayer, kShard, {0, 1}).ok());
  Tokens tokens{{2}, {2}, {3}, {2}, {3}, {3}};
  const CallPtr call = scene.submit(tokens);
  // Worker 0 stands still. What waits for it moves to worker 1, which is judged in the same look
  // and has never shown progress.
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (!scene.client.wait(call, Deadline::after_ms(5)) && !deadline.has_passed()) {
    if (auto request = scene.puppets[1].try_take()) scene.puppets[1].send(echo(*request));
  }
  CHECK(scene.client.workers()[0].standing == Standing::kSuspect);
  CHECK(scene.client.workers()[1].path != PathState::kLost);
  REQUIRE(scene.client.is_done(call));
  CHECK(scene.client.outcome(call).ok());
  CHECK(tokens.is_right());
}

TEST_CASE("slices that wait at a worker whose slots are all withheld move to another one") {
  SceneOptions options = quick();
  options.client.hedge_share = 1;
  options.policy = {1, 2};
  Replicated scene(options);
  Tokens one{{2}};
  for (int i = 0; i < 30; ++i) {  // so that the model of worker 1 predicts something
    REQUIRE(scene.call(one, 1).ok());
  }
  // Worker 1 falls silent. It is not suspected, for a worker without pulses never is, but late.
  Tokens tokens{{2}, {2}, {3}, {3}, {2}, {3}, {2}, {3}};
  const CallPtr call = scene.submit(tokens);
  CHECK(scene.finish_by(0, call).ok());
  CHECK(tokens.is_right());
  CHECK(scene.client.workers()[1].quarantined_slots >= 2);
}

TEST_CASE("a worker that drains gets nothing new while another holder can have it") {
  Replicated scene;
  Tokens tokens{{2}};
  const CallPtr under_way = scene.submit(tokens);
  REQUIRE(scene.client.set_admission(1, Admission::kDraining).ok());
  CHECK(scene.client.take_events().empty());
  Tokens next{{3}};
  CHECK(scene.call(next, 0).ok());
  scene.serve(1);
  CHECK(scene.finish(under_way).ok());
  CHECK(kinds(scene.client.take_events()) == std::vector{EventKind::kIdle});
  // The last holder goes on, however much it should drain.
  REQUIRE(scene.client.set_holders(kLayer, kShard, {1}).ok());
  CHECK(scene.call(next, 1).ok());
}

TEST_CASE("a worker that drains is idle once others have answered what had waited for it") {
  SceneOptions options = quick();
  options.policy = {1, 2};  // a slice for each token, two in flight
  Replicated scene(options);
  Tokens tokens{{2}, {2}, {3}, {2}, {3}, {3}};
  const CallPtr call = scene.submit(tokens);
  REQUIRE(scene.client.set_admission(1, Admission::kDraining).ok());  // four slices move
  for (int i = 0; i < 2; ++i) scene.serve(1);
  for (int i = 0; i < 4; ++i) {
    static_cast<void>(scene.client.is_done(call));
    scene.serve(0);
  }
  REQUIRE(scene.finish(call).ok());
  CHECK(tokens.is_right());
  const std::vector<ClientEvent> events = scene.client.take_events();
  REQUIRE(!events.empty());
  CHECK(events.back().worker == 1);
  CHECK(events.back().kind == EventKind::kIdle);
}

TEST_CASE("slices that wait move when a shard gets other holders") {
  SceneOptions options = quick();
  options.policy = {1, 1};
  Replicated scene(options);
  Tokens tokens{{2}, {2}, {3}};
  const CallPtr call = scene.submit(tokens);  // one under way at worker 1, two wait there
  REQUIRE(scene.client.set_holders(kLayer, kShard, {0}).ok());
  scene.serve(1);
  static_cast<void>(scene.client.is_done(call));
  scene.serve(0);
  static_cast<void>(scene.client.is_done(call));
  scene.serve(0);
  CHECK(scene.finish(call).ok());
  CHECK(tokens.is_right());
  CHECK(!scene.puppets[1].try_take());
}

TEST_CASE("a holder whose slots are too small for a slice is passed over") {
  SceneOptions options = quick();
  Replicated scene(options);
  // Worker 0 gets a path on which no request of twenty rows fits.
  REQUIRE(scene.client.retire_path(0, "a test").ok());
  REQUIRE(scene.renew(0, {3, 512, 512}).ok());
  Tokens tokens{{2}, {2}, {2}, {2}, {2}, {2}, {2}, {2}, {2}, {2}, {2}, {2}};
  const CallPtr call = scene.submit(tokens);
  static_cast<void>(scene.puppets[1].take());
  scene.client.mark_lost(1, "gone");
  const Status outcome = scene.finish(call);
  REQUIRE(!outcome.ok());
  CHECK(outcome.error().message == Has{"w0 has slots too small"});
}

TEST_CASE("holders are checked before anything moves") {
  Replicated scene;
  CHECK(scene.client.set_holders(kLayer, kShard, {}).error().code == ErrorCode::kInvalidArgument);
  CHECK(!scene.client.set_holders(kLayer, kShard, {1, 1}).ok());
  CHECK(!scene.client.set_holders(kLayer, kShard, {7}).ok());
  CHECK(!scene.client.set_holders(kLayer, 9, {1}).ok());
  CHECK(!scene.client.set_holders(99, kShard, {1}).ok());
  REQUIRE(scene.client.set_dtypes(0, Dtype::kF16, Dtype::kF16).ok());
  const Status refused = scene.client.set_holders(kLayer, kShard, {1, 0});
  REQUIRE(!refused.ok());
  CHECK(refused.error().message == Has{"f16"});
  CHECK(refused.error().message == Has{"f32"});
}

TEST_CASE("a holder that dies at any point of a call costs it nothing") {
  // Worker 1 dies at each of the first points of a call at which anything can happen; worker 0
  // stays.
  for (int points = 0; points < 12; ++points) {
    CAPTURE(points);
    SceneOptions options = quick(true);
    options.policy = {1, 2};
    Replicated scene(options);
    Tokens tokens{{2}, {2}, {3}, {0}, {3}, {1}};
    const CallPtr call = scene.submit(tokens);
    int left = points;
    bool is_alive = true;
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (!scene.client.wait(call, Deadline::after_ms(1)) && !deadline.has_passed()) {
      if (auto request = scene.puppets[0].try_take()) scene.puppets[0].send(echo(*request));
      if (!is_alive) continue;
      if (left-- == 0) {
        scene.puppets[1].pulse.close();
        is_alive = false;
      } else if (auto request = scene.puppets[1].try_take()) {
        scene.puppets[1].send(echo(*request));
      }
    }
    REQUIRE(scene.client.is_done(call));
    CHECK(scene.client.outcome(call).ok());
    CHECK(tokens.is_right());
  }
}

}  // namespace
}  // namespace dflash::client

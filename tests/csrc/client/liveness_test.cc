// When a worker or a call is given up, and when not: hang-up, garbage, frozen progress, deadlines,
// quarantine, abandonment.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <thread>

#include "client/puppet.h"
#include "failed.h"

namespace dflash::client {
namespace {

SceneOptions with_pulses(int64_t stall_ms = 100) {
  SceneOptions options;
  options.has_pulses = true;
  options.client.stall_timeout_ns = stall_ms * 1'000'000;
  return options;
}

void check_lost(const Status& outcome, const char* reason) {
  REQUIRE(outcome ==
          Failed(ErrorCode::kWorkerLost, reason, "worker w1", "model.layers.3.mlp.experts"));
}

TEST_CASE("a hang-up of the pulse loses the worker within a few ticks; the other goes on") {
  PuppetScene scene(with_pulses(60'000));
  Tokens tokens{{0}, {2}};
  const CallPtr call = scene.submit(tokens);
  scene.puppets[1].pulse.close();
  const int64_t before_ns = now_ns();
  check_lost(scene.finish(call), "hung up");
  CHECK(now_ns() - before_ns < 20'000'000'000);  // a third of the stall timeout
  CHECK(tokens.is_untouched());
  scene.serve(0);
  CHECK(scene.works(0));
}

TEST_CASE("an idle worker's hang-up is seen by the next call at the latest") {
  PuppetScene scene(with_pulses());
  CHECK(scene.works(1));
  scene.puppets[1].pulse.close();
  // a tick: sooner, the call itself sees it
  std::this_thread::sleep_for(std::chrono::milliseconds(25));
  Tokens tokens{{2}};
  CHECK(scene.client.submit(tokens.batch(), 3) == Failed(ErrorCode::kWorkerLost));
}

TEST_CASE("a frozen counter loses a worker that owes replies, and only such a worker") {
  PuppetScene scene(with_pulses());
  scene.puppets[0].send_pulse(1);
  scene.puppets[1].send_pulse(1);
  Tokens tokens{{2}};
  check_lost(scene.finish(scene.submit(tokens)), "no progress for 0.1 s");
  CHECK(scene.client.workers()[0].path != PathState::kLost);
  CHECK(scene.works(0));
}

TEST_CASE("whether a worker runs is told by its last pulse, also where it makes no progress") {
  PuppetScene scene(with_pulses(60'000));
  scene.puppets[1].send_pulse(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const int64_t before_ns = now_ns();
  // The two sides of a comparison are evaluated in any order, so the age is asked for first.
  const int64_t fresh_ns = scene.client.pulse_age_ns(1).value();
  CHECK(fresh_ns <= now_ns() - before_ns);  // it was read just now
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(scene.client.pulse_age_ns(1).value() >= 20'000'000);
  scene.puppets[1].send_pulse(1);
  const int64_t newer_ns = scene.client.pulse_age_ns(1).value();
  CHECK(newer_ns < scene.client.pulse_age_ns(0).value());
  CHECK(scene.client.pulse_age_ns(7).error().code == ErrorCode::kInvalidArgument);
}

TEST_CASE("pulses that repeat the same number are not progress") {
  PuppetScene scene(with_pulses());
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  while (!scene.client.wait(call, Deadline::after_ms(10))) scene.puppets[1].send_pulse(9);
  check_lost(scene.client.outcome(call), "no progress");
}

TEST_CASE("a worker that is slow but makes progress is not lost") {
  // A stall of 600 ms, so that a test thread that waits for its core is not taken for one.
  PuppetScene scene(with_pulses(600));
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const Message request = scene.puppets[1].take();
  const Deadline two_stalls = Deadline::after_ms(1200);
  uint64_t counter = 0;
  while (!two_stalls.has_passed()) {
    scene.puppets[1].send_pulse(++counter);
    REQUIRE(!scene.client.wait(call, Deadline::after_ms(5)));
  }
  scene.puppets[1].send(echo(request));
  CHECK(scene.finish(call).ok());
  CHECK(tokens.is_right());
}

TEST_CASE("bytes that are no pulse lose the worker") {
  PuppetScene scene(with_pulses(60'000));
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const char garbage[16] = "not a pulse";
  REQUIRE(::send(scene.puppets[1].pulse.get(), garbage, sizeof garbage, 0) == sizeof garbage);
  check_lost(scene.finish(call), "no pulse");
}

TEST_CASE("a pulse that arrives in pieces is one pulse") {
  PuppetScene scene(with_pulses(60'000));
  const uint64_t words[2] = {(uint64_t{1} << 32) | 0x534c5550u, 4};
  std::byte bytes[16];
  std::memcpy(bytes, words, sizeof bytes);
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  for (const std::byte& one : bytes) {
    REQUIRE(::send(scene.puppets[1].pulse.get(), &one, 1, 0) == 1);
    REQUIRE(!scene.client.wait(call, Deadline::after_ms(25)));
  }
  scene.serve(1);
  CHECK(scene.finish(call).ok());
}

TEST_CASE("a reply that already arrived wins over the loss of its worker") {
  for (const bool is_marked : {true, false}) {
    CAPTURE(is_marked);
    PuppetScene scene(with_pulses(60'000));
    Tokens tokens{{2}};
    const CallPtr call = scene.submit(tokens);
    scene.serve(1);
    if (is_marked) {
      scene.client.mark_lost(1, "its process ended");
    } else {
      scene.puppets[1].pulse.close();
    }
    CHECK(scene.finish(call).ok());
    CHECK(tokens.is_right());
  }
}

TEST_CASE("a worker marked lost ends its calls and refuses new ones with the reason") {
  PuppetScene scene;
  Tokens tokens{{0}, {2}};
  const CallPtr call = scene.submit(tokens);
  scene.client.mark_lost(1, "its process ended with code 9");
  check_lost(scene.finish(call), "its process ended with code 9");
  const auto refused = scene.client.submit(tokens.batch(), 3);
  REQUIRE(!refused.ok());
  check_lost(refused.error(), "its process ended with code 9");
  scene.client.mark_lost(1, "another reason");
  CHECK(scene.client.workers()[1].reason == "its process ended with code 9");
}

TEST_CASE(
    "a deadline ends the call naming worker, layer and limit; the slot is quarantined until the "
    "very reply comes") {
  PuppetScene scene(with_deadline(60));
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  const Message request = scene.puppets[1].take();
  CHECK(scene.finish(call) ==
        Failed(ErrorCode::kTimeout, "worker w1", "model.layers.3.mlp.experts", "0.1 s"));
  CHECK(scene.client.workers()[1].quarantined_slots == 1);
  CHECK(scene.client.workers()[1].path != PathState::kLost);

  scene.puppets[1].send(echo(request));
  CHECK(scene.works(1));
  CHECK(tokens.is_untouched());
  CHECK(scene.client.workers()[1].quarantined_slots == 0);
  CHECK(scene.client.workers()[1].stale_replies == 1);
}

TEST_CASE(
    "with every slot in quarantine calls still end by their deadline, and a new channel heals the "
    "worker") {
  PuppetScene scene(with_deadline(40));
  for (int i = 0; i < 3; ++i) {
    Tokens tokens{{2}};
    CHECK(scene.finish(scene.submit(tokens)) == Failed(ErrorCode::kTimeout));
  }
  CHECK(scene.client.workers()[1].quarantined_slots == 2);
  REQUIRE(scene.renew(1, {2, 4096, 4096}).ok());
  CHECK(scene.client.workers()[1].quarantined_slots == 0);
  CHECK(scene.client.workers()[1].generation == kGeneration + 1);
  CHECK(scene.works(1));
}

TEST_CASE("a channel with a call in flight is not replaced") {
  PuppetScene scene;
  Tokens tokens{{2}};
  const CallPtr call = scene.submit(tokens);
  CHECK(!scene.renew(1).ok());
  scene.serve(1);
  CHECK(scene.finish(call).ok());
}

TEST_CASE("another answer than the awaited one in a quarantined slot loses the worker") {
  PuppetScene scene(with_deadline(40));
  Tokens late{{2}}, next{{2}};
  static_cast<void>(scene.finish(scene.submit(late)));
  Message wrong = echo(scene.puppets[1].take());
  wrong.header.call_id += 1;
  scene.puppets[1].send(wrong);
  const Status outcome = scene.finish(scene.submit(next));
  REQUIRE(outcome == Failed(ErrorCode::kProtocol));
}

TEST_CASE(
    "an abandoned call's output is not written by its late reply, and its queued slices are never "
    "sent") {
  SceneOptions options;
  options.policy = {1, 1};
  PuppetScene scene(options);
  Tokens tokens{{2}, {3}, {2}};
  const CallPtr call = scene.submit(tokens);
  const Message request = scene.puppets[1].take();
  scene.client.abandon(call);
  CHECK(scene.client.is_done(call));
  CHECK(scene.client.outcome(call).error().code == ErrorCode::kClosed);
  scene.client.abandon(call);  // again, to no effect
  scene.puppets[1].send(echo(request));
  CHECK(scene.works(1));
  CHECK(tokens.is_untouched());
  CHECK(!scene.puppets[1].try_take());
  CHECK(scene.client.workers()[1].stale_replies == 1);
}

TEST_CASE("the window bounds what is in flight, and every reply makes room for the next slice") {
  SceneOptions options;
  options.policy = {1, 1};
  PuppetScene scene(options);
  Tokens tokens{{2}, {3}, {2}};
  const CallPtr call = scene.submit(tokens);
  for (int i = 0; i < 3; ++i) {
    const Message request = scene.puppets[1].take();
    CHECK(request.header.slice == i);
    CHECK(!scene.puppets[1].try_take());
    scene.puppets[1].send(echo(request));
    CHECK(scene.client.wait(call, Deadline::after_ms(i == 2 ? kPatienceMs : 30)) == (i == 2));
  }
  CHECK(tokens.is_right());
}

TEST_CASE("more calls than the bound are refused until one is done") {
  SceneOptions options;
  options.client.max_calls = 2;
  PuppetScene scene(options);
  Tokens a{{2}}, b{{2}}, c{{2}};
  const CallPtr first = scene.submit(a), second = scene.submit(b);
  CHECK(scene.client.submit(c.batch(), 3).error().code == ErrorCode::kInvalidArgument);
  scene.client.abandon(first);
  CHECK(scene.client.submit(c.batch(), 3).ok());
}

}  // namespace
}  // namespace dflash::client

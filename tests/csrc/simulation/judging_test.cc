// What counts against a worker, and what does not: time in which nobody looked does not; a worker
// that answers nothing is given up however well its pulse goes; one that is only slow never is.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>

#include "client/liveness.h"
#include "failed.h"
#include "simulation/virtual_scene.h"

namespace dflash::simulation {
namespace {

using client::ClientEvent;
using client::EventKind;
using client::SceneOptions;
using client::Tokens;

SceneOptions with_limit(int64_t call_timeout_ns) {
  SceneOptions options;
  options.client.call_timeout_ns = call_timeout_ns;
  options.client.hedge_share = 0;
  return options;
}

bool has_suspected(VirtualScene& at, uint32_t worker) {
  for (const ClientEvent& event : at.scene.client.take_events()) {
    if (event.worker == worker && event.kind == EventKind::kSuspect) return true;
  }
  return false;
}

// -- time that counts

TEST_CASE("a caller that computes between submit and result blames nobody") {
  SceneOptions options = with_limit(kS);
  options.policy = {1, 1};  // the second and third slice are sent when somebody drives
  VirtualScene at(options);
  at.run([&at] {
    Tokens tokens{{2}, {3}, {2}};
    const auto call = at.scene.submit(tokens);
    at.compute(5 * kS);
    CHECK(at.wait(call));
    CHECK(at.scene.client.outcome(call).ok());
    CHECK(tokens.is_right());
  });
}

TEST_CASE("a process that was stopped blames nobody, whether its workers were stopped with it") {
  for (const bool stops_workers : {false, true}) {
    SceneOptions options = with_limit(2 * kS);
    options.client.stall_timeout_ns = kS;
    VirtualScene at(options);
    at.workers[1].answer_ns = 1500 * kMs;
    at.run([&at, stops_workers] {
      Tokens tokens{{2}};
      const auto call = at.scene.submit(tokens);
      at.stop_host(kS, 30 * kS, stops_workers);
      CHECK(at.wait(call));
      CHECK(at.scene.client.outcome(call).ok());
      CHECK(tokens.is_right());
      CHECK(at.now() > 31 * kS);
      CHECK(at.scene.client.take_events().empty());
    });
  }
}

TEST_CASE("a worker that stood still while nobody looked is not lost for it") {
  SceneOptions options = with_limit(30 * kS);
  options.client.stall_timeout_ns = kS;
  VirtualScene at(options);
  at.workers[1].is_stopped = true;
  at.run([&at] {
    Tokens tokens{{2}};
    const auto call = at.scene.submit(tokens);
    at.compute(10 * kS);
    at.scheduler.after(500 * kMs, [&at] { at.workers[1].is_stopped = false; });
    CHECK(at.wait(call));
    CHECK(at.scene.client.outcome(call).ok());
  });
}

TEST_CASE("time that is looked at counts: deadlines are no later than they say") {
  VirtualScene at(with_limit(2 * kS));
  at.workers[1].is_mute = true;
  at.run([&at] {
    const auto [outcome, took_ns] = at.call(1);
    CHECK(outcome.error().code == ErrorCode::kTimeout);
    CHECK(took_ns >= 2 * kS);
    CHECK(took_ns <= 2 * kS + 2 * client::kTickNs);
  });
}

TEST_CASE("a caller's own time to wait is the machine's") {
  VirtualScene at(with_limit(30 * kS));
  at.workers[1].is_mute = true;
  at.run([&at] {
    Tokens tokens{{2}};
    const auto call = at.scene.submit(tokens);
    const int64_t until = at.now() + kS;
    at.compute(3 * kS);
    CHECK(!at.scene.client.wait(call, Deadline::at_ns(until)));
    CHECK(at.now() <= until + 2 * kS);
    at.scene.client.abandon(call);
  });
}

// -- who answers nothing

TEST_CASE("a worker that answers nothing is suspected after one limit and lost after two") {
  VirtualScene at(with_limit(2 * kS));
  at.workers[1].is_mute = true;
  at.run([&at] {
    const int64_t began = at.now();
    CHECK(at.call(1).first.error().code == ErrorCode::kTimeout);
    Tokens tokens{{2}};
    const auto second = at.scene.submit(tokens);
    CHECK(!at.wait(second, kS));
    CHECK(at.scene.client.workers()[1].standing == client::Standing::kSuspect);
    CHECK(at.scene.client.workers()[1].reason == "answers nothing");
    CHECK(at.wait(second));
    const Status third = at.call(1).first;
    CHECK(third == Failed(ErrorCode::kWorkerLost, "answers nothing although its pulse goes on"));
    CHECK(at.now() - began <= 4 * kS + 4 * client::kTickNs);
    CHECK(at.is_lost(1));
    const auto events = at.scene.client.take_events();
    CHECK(events.front().kind == EventKind::kSuspect);
    CHECK(events.front().reason == "answers nothing");
    CHECK(events.back().kind == EventKind::kLost);
  });
}

TEST_CASE("a worker that stands still too is not said to have a pulse") {
  SceneOptions options = with_limit(kS);
  options.client.stall_timeout_ns = 30 * kS;
  VirtualScene at(options);
  at.workers[1].is_stopped = true;
  at.run([&at] {
    for (int i = 0; i < 2; ++i) static_cast<void>(at.call(1));
    const Status third = at.call(1).first;
    CHECK(third.error().message == Has{"answers nothing: no whole answer for 2.0 s"});
  });
}

TEST_CASE("the first call waits for whoever takes a silent worker's place, and is answered") {
  // The host's own copy joins when the worker is suspected, as in a runtime.
  SceneOptions options = with_limit(2 * kS);
  options.last_resort = 0;
  VirtualScene at(options);
  at.workers[1].is_mute = true;
  at.run([&at] {
    CHECK(at.scene.client.set_stand_in(1, true).ok());
    Tokens tokens{{2}, {3}, {2}};
    const int64_t began = at.now();
    const auto call = at.scene.submit(tokens);
    int64_t joins_ns = 0;
    CHECK(at.wait(call, 600 * kS, [&] {
      if (has_suspected(at, 1)) joins_ns = at.now() + 500 * kMs;  // until it has mapped its files
      if (joins_ns > 0 && at.now() >= joins_ns)
        CHECK(at.scene.client.set_holders(3, 1, {1, 0}).ok());
    }));
    CHECK(at.scene.client.outcome(call).ok());
    CHECK(tokens.is_right());
    CHECK(at.now() - began < 4 * kS);
    // Suspected, not lost: what comes next does not wait for it.
    for (int i = 0; i < 20; ++i) {
      const auto [outcome, took_ns] = at.call(1);
      CHECK(outcome.ok());
      CHECK(took_ns <= 100 * kMs);
    }
    CHECK(!at.is_lost(1));
  });
}

TEST_CASE("without a stand-in, a call ends at its own deadline") {
  VirtualScene at(with_limit(2 * kS));
  at.workers[1].is_mute = true;
  at.run([&at] {
    CHECK(at.scene.client.set_remedy(1, true).ok());
    const auto [outcome, took_ns] = at.call(1);
    CHECK(outcome.error().code == ErrorCode::kTimeout);
    CHECK(took_ns <= 2 * kS + 2 * client::kTickNs);
  });
}

TEST_CASE("a replica answers for a silent worker, which is given up all the same") {
  VirtualScene at(with_limit(2 * kS));
  at.workers[1].is_mute = true;
  at.run([&at] {
    CHECK(at.scene.client.set_holders(3, 1, {1, 0}).ok());
    const int64_t began = at.now();
    const auto [first, first_ns] = at.call(1);
    CHECK(first.ok());
    CHECK(first_ns < 4 * kS);
    while (!at.is_lost(1) && at.now() - began < 60 * kS) {
      const auto [outcome, took_ns] = at.call(1);
      CHECK(outcome.ok());
      CHECK(took_ns <= 100 * kMs);
    }
    CHECK(at.is_lost(1));
    CHECK(at.now() - began <= 4 * kS + 4 * client::kTickNs);
    CHECK(at.workers[1].num_requests == 1);
  });
}

TEST_CASE("a late answer lifts the suspicion, and a slow worker that answers stays") {
  VirtualScene at(with_limit(2 * kS));
  at.workers[1].answer_ns = 3 * kS;  // longer than any call may take
  at.run([&at] {
    for (int i = 0; i < 8; ++i) {
      const Status outcome = at.call(1).first;
      CHECK((outcome.ok() || outcome.error().code == ErrorCode::kTimeout));
    }
    CHECK(!at.is_lost(1));
    bool was_suspected = false, was_well = false;
    for (const ClientEvent& event : at.scene.client.take_events()) {
      was_suspected = was_suspected || event.kind == EventKind::kSuspect;
      was_well = was_well || event.kind == EventKind::kWell;
    }
    CHECK(was_suspected);
    CHECK(was_well);
  });
}

TEST_CASE("a pulse does not lift the suspicion, and neither does a fresh path") {
  VirtualScene at(with_limit(2 * kS));
  at.workers[1].is_mute = true;
  at.run([&at] {
    const int64_t began = at.now();
    // Callers who lose patience wear the path out, which is renewed each time.
    while (!at.is_lost(1) && at.now() - began < 60 * kS) {
      Tokens tokens{{2}};
      const auto call = at.scene.client.submit(tokens.batch(), 3);
      if (!call.ok()) break;
      static_cast<void>(at.wait(call.value(), 150 * kMs));
      at.scene.client.abandon(call.value());
      if (at.scene.client.workers()[1].path == client::PathState::kWorn) at.reconnect(1, false);
    }
    CHECK(at.is_lost(1));
    CHECK(at.scene.client.workers()[1].generation > client::kGeneration + 5);
    CHECK(at.now() - began <= 5 * kS);
  });
}

TEST_CASE("a silence lasts only while an answer is owed, not while a fresh path owes nothing") {
  VirtualScene at(with_limit(2 * kS));
  at.run([&at] {
    Tokens tokens{{2}};
    at.workers[1].is_mute = true;
    const auto call = at.scene.submit(tokens);
    CHECK(!at.wait(call, 1500 * kMs));
    at.scene.client.abandon(call);
    at.reconnect(1, false);
    at.workers[1].is_mute = false;
    for (int i = 0; i < 1000; ++i) {  // 10 s in which others are asked
      CHECK(at.call(0).first.ok());
      at.compute(10 * kMs);
    }
    CHECK(at.scene.client.workers()[1].standing != client::Standing::kSuspect);
    CHECK(at.call(1).first.ok());
    CHECK(!at.is_lost(1));
  });
}

TEST_CASE("a worker that comes back is asked for one thing until it answers, and nobody waits") {
  for (const bool answers : {false, true}) {
    CAPTURE(answers);
    VirtualScene at(with_limit(2 * kS));
    at.workers[1].is_mute = true;
    at.run([&at, answers] {
      CHECK(at.scene.client.set_holders(3, 1, {1, 0}).ok());
      while (!at.is_lost(1) && at.now() < 60 * kS) CHECK(at.call(1).first.ok());
      at.reconnect(1, true);
      CHECK(at.scene.client.workers()[1].standing != client::Standing::kSuspect);
      at.workers[1].is_mute = !answers;
      at.workers[1].num_requests = 0;
      const int64_t back_ns = at.now();
      for (int i = 0; i < 50; ++i) {
        const auto [outcome, took_ns] = at.call(1);
        CHECK(outcome.ok());
        CHECK(took_ns <= 100 * kMs);
      }
      CHECK(at.workers[1].num_requests == (answers ? 50 : 1));
      while (!at.is_lost(1) && at.now() - back_ns < 10 * kS) CHECK(at.call(1).first.ok());
      CHECK(at.is_lost(1) == !answers);
      if (!answers) CHECK(at.now() - back_ns <= 4 * kS + 4 * client::kTickNs);
    });
  }
}

TEST_CASE("a worker of which much is predicted has as much more time to answer") {
  SceneOptions options = with_limit(2 * kS);
  options.policy = {64, 1, true};
  VirtualScene at(options);
  at.workers[1].answer_ns = 1900 * kMs;
  at.run([&at] {
    for (int i = 0; i < 5; ++i) CHECK(at.call(1).first.ok());
    Tokens tokens{{2}};
    const auto call = at.scene.submit(tokens);
    const int64_t limit_ns = call->deadline_ns - call->asked_ns;
    CHECK(limit_ns > 2500 * kMs);
    at.workers[1].answer_ns = limit_ns - 100 * kMs;
    CHECK(at.wait(call));
    CHECK(at.scene.client.outcome(call).ok());
    CHECK(at.scene.client.take_events().empty());
  });
}

}  // namespace
}  // namespace dflash::simulation

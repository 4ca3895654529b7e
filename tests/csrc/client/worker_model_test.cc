// From timestamps to curves: clocks that disagree, replies that queue, workers that claim what
// cannot be; and the engine around it.
// SPDX-License-Identifier: Apache-2.0
#include "client/worker_model.h"

#include <doctest/doctest.h>

#include "puppet.h"

namespace dflash::client {
namespace {

constexpr int64_t kMs = 1'000'000;

// One exchange at `now`: 3 ms there, 10 ms of work after 1 ms of checking, 2 ms back, on a clock
// `offset` ahead of the host's.
ReplyTimes exchange_at(int64_t now, int64_t offset = 0) {
  ReplyTimes times;
  times.encode_start_ns = now;
  times.published_ns = now + kMs / 2;
  times.worker_received_ns = times.published_ns + 3 * kMs + offset;
  times.worker_started_ns = times.worker_received_ns + kMs;
  times.worker_finished_ns = times.worker_started_ns + 10 * kMs;
  times.arrived_ns = times.published_ns + 16 * kMs;
  times.found_idle = true;
  return times;
}

constexpr SliceSize kSize{400, 16, 100'000, 100'000};

double seconds_sent(const WorkerModel& model) { return model.send().predict(100'000, 0) * 1e-9; }

TEST_CASE("one exchange teaches all three curves") {
  WorkerModel model;
  model.observe(0, kSize, exchange_at(0));
  CHECK(model.compute().at(0).predict(400, 16) == doctest::Approx(10e6));
  // The clocks are taken to agree where both ways took equally long: 2.5 ms each; encoding and
  // checking belong to the way there.
  CHECK(seconds_sent(model) == doctest::Approx(4e-3));
  CHECK(model.receive().predict(100'000, 0) == doctest::Approx(2.5e6));
}

TEST_CASE("what the stages of a chunk do not explain is learned as waiting and moves no choice") {
  WorkerModel model;
  model.observe(0, kSize, exchange_at(10 * kMs));
  const Chunk chunk{1024, 1, 100, 400, 16, 100'000, 100'000};
  const SliceChoice first = model.choose(0, chunk, 2, false);
  const double stages_ns = first.taken.ns;
  CHECK(first.taken.wait_ns == 0);
  for (int i = 0; i < 40; ++i) {
    const SliceChoice choice = model.choose(0, chunk, 2, false);
    // Every fourth chunk is quicker than its stages: the median does not follow it.
    model.record(0, 1024, choice.taken, stages_ns + (i % 4 == 0 ? -5e6 : 7e6));
  }
  const SliceChoice taught = model.choose(0, chunk, 2, false);
  CHECK(taught.taken.wait_ns == doctest::Approx(7e6));
  CHECK(taught.taken.ns == doctest::Approx(stages_ns + 7e6));
  CHECK(taught.taken.num_slices == first.taken.num_slices);
  CHECK(model.choose(1, chunk, 2, false).taken.wait_ns == 0);  // of another class
  for (int i = 0; i < 40; ++i) model.record(0, 1024, {1, 2, stages_ns, 0}, stages_ns / 2);
  CHECK(model.choose(0, chunk, 2, false).taken.wait_ns == 0);  // never below nothing
}

TEST_CASE("a clock that is hours ahead or behind changes nothing") {
  for (const int64_t offset : {int64_t{-7'200'000} * kMs, int64_t{7'200'000} * kMs}) {
    WorkerModel model;
    model.observe(0, kSize, exchange_at(50 * kMs, offset));
    CHECK(seconds_sent(model) == doctest::Approx(4e-3));
    CHECK(model.receive().predict(100'000, 0) == doctest::Approx(2.5e6));
  }
}

TEST_CASE("the shortest exchange sets the clocks right for the longer ones") {
  WorkerModel model;
  ReplyTimes quick = exchange_at(0, 500 * kMs);  // 1 ms each way
  quick.worker_received_ns = quick.published_ns + kMs + 500 * kMs;
  quick.worker_started_ns = quick.worker_received_ns;
  quick.worker_finished_ns = quick.worker_started_ns + kMs;
  quick.arrived_ns = quick.published_ns + 3 * kMs;
  model.observe(0, {4, 4, 1'000, 1'000}, quick);
  model.observe(0, kSize, exchange_at(100 * kMs, 500 * kMs));
  CHECK(model.clock_offset_ns() == 500 * kMs);
  CHECK(seconds_sent(model) == doctest::Approx(4.5e-3).epsilon(0.05));
  CHECK(model.receive().predict(100'000, 0) == doctest::Approx(2e6).epsilon(0.05));
}

TEST_CASE("a request sent while the worker owed another teaches nothing about the way there") {
  WorkerModel model;
  ReplyTimes times = exchange_at(0);
  times.found_idle = false;
  model.observe(0, kSize, times);
  CHECK(!model.send().is_known());
  CHECK(model.compute().at(0).is_known());
}

TEST_CASE("a reply that queued behind another teaches nothing about the way back") {
  WorkerModel model;
  model.observe(0, kSize, exchange_at(0));
  const uint64_t known = model.receive().num_samples();
  ReplyTimes queued = exchange_at(0);  // ready before the former one had arrived
  queued.arrived_ns += 20 * kMs;
  queued.found_idle = false;
  model.observe(0, kSize, queued);
  CHECK(model.receive().num_samples() == known);
}

TEST_CASE("time behind other hosts is neither sending nor computing, and is expected for a while") {
  WorkerModel alone, shared;
  for (int64_t call = 0; call < 6; ++call) {
    const int64_t now = call * 100 * kMs;
    ReplyTimes times = exchange_at(now);
    alone.observe(0, kSize, times);
    // The same exchange, which waits 30 ms for others between receipt and start.
    times.worker_started_ns += 30 * kMs;
    times.worker_finished_ns += 30 * kMs;
    times.arrived_ns += 30 * kMs;
    times.worker_behind_ns = 30 * kMs;
    shared.observe(0, kSize, times);
  }
  CHECK(shared.send().predict(100'000, 0) == doctest::Approx(alone.send().predict(100'000, 0)));
  CHECK(shared.compute().at(0).predict(400, 16) == doctest::Approx(10e6));
  const int64_t last = 600 * kMs;
  CHECK(alone.behind_ns(last) == 0);
  CHECK(shared.behind_ns(last) == 30 * kMs);
  CHECK(shared.behind_ns(last + 5'000 * kMs) == 0);  // no news: it is tried again
  // A worker that others leave is believed to be free within a few replies.
  for (int64_t call = 6; call < 30; ++call) shared.observe(0, kSize, exchange_at(call * 100 * kMs));
  CHECK(shared.behind_ns(3'000 * kMs) < kMs);
  // Nobody can have waited longer than a request lay there.
  ReplyTimes lie = exchange_at(3'000 * kMs);
  lie.worker_behind_ns = 1'000 * kMs;
  shared.observe(0, kSize, lie);
  CHECK(shared.behind_ns(3'000 * kMs) < kMs);
}

TEST_CASE(
    "times that cannot be are ignored: longer than the host waited, backwards, at the ends of the "
    "range") {
  WorkerModel model;
  for (const auto& [received, started, finished] : {
           std::tuple<int64_t, int64_t, int64_t>{0,         1,  INT64_MAX},
           {INT64_MIN, 0,  INT64_MAX},
           {10,        5,  20       },
           {10,        20, 15       },
           {0,         0,  0        },
           {0,         10, INT64_MIN}
  }) {
    ReplyTimes times = exchange_at(0);
    times.worker_received_ns = received;
    times.worker_started_ns = started;
    times.worker_finished_ns = finished;
    model.observe(0, kSize, times);
  }
  CHECK(!model.compute().contains(0));
  CHECK(!model.send().is_known());
}

TEST_CASE("layers of two classes have curves of their own") {
  WorkerModel model;
  model.observe(0, kSize, exchange_at(0));
  CHECK(model.compute().contains(0));
  CHECK(!model.compute().contains(1));
}

// An honest answer with the times of a worker that took `compute_ns`.
Message timed_echo(const Message& request, int64_t compute_ns) {
  Message reply = echo(request);
  const int64_t now = now_ns();
  wire::encode_reply_timing({now - compute_ns, now - compute_ns, now},
                            std::span(reply.payload).first<wire::kReplyTimingBytes>());
  reply.seal();
  return reply;
}

// Runs one call of `tokens` in the scene; every request is answered after a real delay of its
// worker.
void run_call(PuppetScene& scene, Tokens& tokens, const std::vector<int64_t>& delays_ns,
              std::vector<size_t>* order = nullptr) {
  const CallPtr call = scene.submit(tokens);
  for (size_t answered = 0, worker = 0; !scene.client.is_done(call);
       worker = (worker + 1) % scene.puppets.size()) {
    const auto request = scene.puppets[worker].try_take();
    if (!request) continue;
    if (order != nullptr) order->push_back(worker);
    const Deadline until = Deadline::after_ns(delays_ns[worker]);
    while (!until.has_passed()) {
    }
    scene.puppets[worker].send(timed_echo(*request, delays_ns[worker]));
    REQUIRE(++answered < 1000);
  }
  REQUIRE(scene.client.outcome(call).ok());
  CHECK(tokens.is_right());
}

// Whether two calls at once were asked of two workers alike, which hold both shards.
bool are_spread_evenly() {
  SceneOptions options;
  options.policy = {64, 2, true};
  options.client.hedge_share = 0;
  PuppetScene scene(options);
  REQUIRE(scene.client.set_holders(3, 0, {0, 1}).ok());
  REQUIRE(scene.client.set_holders(3, 1, {1, 0}).ok());
  Tokens learned{
      {0, 2}
  },
      first{{0, 2}}, second{{0, 2}};
  // Worker 0 takes 30 ms for a slice, worker 1 takes 20 ms.
  for (int i = 0; i < 4; ++i) run_call(scene, learned, {30 * kMs, 20 * kMs});
  const auto calls = [&](uint32_t worker) { return scene.counters(worker).calls; };
  const uint64_t before[2] = {calls(0), calls(1)};
  // Both are idle, then worker 1 has less to do: it gets shard 0, after which worker 0 has less.
  const CallPtr pending[2] = {scene.submit(first), scene.submit(second)};
  const bool is_even = calls(0) == before[0] + 2 && calls(1) == before[1] + 2;
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (!deadline.has_passed() && !(scene.client.wait(pending[0], Deadline::after_ms(1)) &&
                                     scene.client.wait(pending[1], Deadline::after_ms(1)))) {
    for (Puppet& puppet : scene.puppets)
      if (auto request = puppet.try_take()) puppet.send(echo(*request));
  }
  CHECK(first.is_right());
  CHECK(second.is_right());
  return is_even;
}

TEST_CASE("what a call brings to a worker counts for where its other shards go") {
  // A busy machine may teach that one worker takes more than twice as long as the other.
  bool is_even = false;
  for (int round = 0; round < 10 && !is_even; ++round) is_even = are_spread_evenly();
  CHECK(is_even);
}

TEST_CASE("the client predicts a chunk from earlier ones and records what it took") {
  PuppetScene scene(SceneOptions{
      .num_workers = 1, .policy = {64, 2, true}
  });
  Tokens tokens{
      {0, 1},
      {1, 0},
      {0, 1}
  };
  for (int i = 0; i < 4; ++i) run_call(scene, tokens, {2 * kMs});
  const auto forecasts = scene.client.forecasts();
  REQUIRE(forecasts[0].chunks.size() == 1);
  const ChunkRecord& record = forecasts[0].chunks[0];
  CHECK(record.num_tokens == 3);
  CHECK(record.num_chunks == 4);
  CHECK(record.choice.reason == ChoiceReason::kSmall);
  CHECK(record.num_measured == 3);  // the first had no prediction
  CHECK(record.measured_ns[0] >= 2 * kMs);
}

TEST_CASE("the worker with the longest predicted work is rung first") {
  PuppetScene scene(SceneOptions{
      .num_workers = 2, .policy = {64, 2}
  });
  Tokens tokens{
      {0, 2},
      {1, 3}
  };  // both workers, equally
  for (int i = 0; i < 3; ++i) run_call(scene, tokens, {0, 3 * kMs});
  const CallPtr call = scene.submit(tokens);
  const Message first = scene.puppets[0].take(), second = scene.puppets[1].take();
  scene.puppets[0].send(echo(first));
  scene.puppets[1].send(echo(second));
  scene.client.set_profile(true);
  REQUIRE(scene.finish(call).ok());
  const auto traces = scene.client.take_traces();
  REQUIRE(traces.size() == 2);
  CHECK(traces[0].worker == 0);
  CHECK(traces[1].encode_start_ns < traces[0].encode_start_ns);
}

TEST_CASE("a worker that is predicted to need longer gets more time, within a bound") {
  SceneOptions options{
      .num_workers = 1, .policy = {64, 2}
  };
  options.client.call_timeout_ns = 400 * kMs;
  PuppetScene scene(options);
  Tokens tokens{
      {0, 1}
  };
  // The next may take 1,600 ms, not 400: a second of room for a thread that waits for its core.
  run_call(scene, tokens, {400 * kMs});
  const CallPtr call = scene.submit(tokens);
  const Message request = scene.puppets[0].take();
  CHECK(!scene.client.wait(call, Deadline::after_ms(500)));
  scene.puppets[0].send(echo(request));
  CHECK(scene.finish(call).ok());
  run_call(scene, tokens, {0});
  // A claim beyond what the host saw is not believed, so no lie buys patience.
  const CallPtr lied = scene.submit(tokens);
  const Message asked = scene.puppets[0].take();
  scene.puppets[0].send(timed_echo(asked, 3'600'000 * kMs));
  CHECK(scene.finish(lied).ok());
  const WorkerForecast forecast = scene.client.forecasts()[0];
  for (const auto& [cost_class, found] : forecast.compute) CHECK(found.per_unit * 2 < 200e6);
}

}  // namespace
}  // namespace dflash::client

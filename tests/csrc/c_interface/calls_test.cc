// Calls through the C functions: their results, what they refuse, and how they end when a worker or
// the supervisor is gone.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>

#include <algorithm>
#include <iostream>

#include "c_interface/stand_ins.h"
#include "failed.h"
#include "foreign_float_mode.h"

namespace dflash::c_interface {
namespace {

std::string error() { return dflash_moe_error(); }

// Repeats calls until one ends with `status`.
void await_status(Scene& scene, int status) {
  const Deadline deadline = patience();
  int found = status + 1;
  while (found != status && !deadline.has_passed()) {
    Tokens tokens(3);
    found = run(scene.client, tokens);
  }
  REQUIRE(found == status);
}

TEST_CASE("calls of every size and stride give what the workers compute, from many threads") {
  Scene scene({.num_workers = 2});
  for (const uint32_t num_tokens : {1u, 5u, 300u}) CHECK(scene.works(num_tokens));
  Tokens none(1);
  none.batch.num_tokens = 0;
  CHECK(run(scene.client, none) == DFLASH_MOE_OK);

  Tokens strided(4);
  std::vector<float> wide(4 * (kWidth + 9));
  for (size_t t = 0; t < 4; ++t) {
    std::copy_n(strided.hidden.begin() + static_cast<std::ptrdiff_t>(t * kWidth), kWidth,
                wide.begin() + static_cast<std::ptrdiff_t>(t * (kWidth + 9)));
  }
  strided.batch.hidden_states = wide.data();
  strided.batch.hidden_states_stride = (kWidth + 9) * sizeof(float);
  CHECK(run(scene.client, strided) == DFLASH_MOE_OK);
  CHECK(strided.is_right());

  std::atomic<int> num_right = 0;
  std::vector<std::thread> callers;
  for (uint32_t i = 0; i < 3; ++i) {
    callers.emplace_back([&, i] {
      for (uint32_t round = 0; round < 20; ++round) {
        Tokens tokens(1 + (i + round) % 7);
        if (run(scene.client, tokens) == DFLASH_MOE_OK && tokens.is_right()) ++num_right;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(num_right == 60);
}

TEST_CASE("the floating-point mode of the calling thread changes no bit of a result") {
  Scene scene({.num_workers = 2});
  for (const float scale : {1.0f, 1e-40f}) {
    // Token 1 has its experts at both workers, and sums that round at every digit.
    const auto make = [scale] {
      auto tokens = std::make_unique<Tokens>(4);
      for (float& value : tokens->hidden) value *= scale;
      for (size_t i = 1; i < tokens->weights.size(); i += 2) tokens->weights[i] = 7.8e-8f;
      return tokens;
    };
    const auto expected = make();
    REQUIRE(run(scene.client, *expected) == DFLASH_MOE_OK);
    for (const unsigned word : kForeignModes) {
      const auto found = make();
      {
        const ForeignFloatMode mode(word);
        REQUIRE(run(scene.client, *found) == DFLASH_MOE_OK);
        CHECK(float_control() == word);
      }
      CHECK(std::memcmp(found->output.data(), expected->output.data(),
                        found->output.size() * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("wrong arguments are refused by name, and nothing is written") {
  Scene scene;
  const auto refused = [&](auto change) {
    Tokens tokens(2);
    change(tokens);
    int status = DFLASH_MOE_OK;
    CHECK(dflash_moe_submit(scene.client, &tokens.batch, &status) == nullptr);
    CHECK(status == DFLASH_MOE_INVALID);
    CHECK(tokens.output[0] == -7);
    return error();
  };
  CHECK(refused([](Tokens& t) { t.batch.struct_bytes = 0; }).find("struct_bytes") !=
        std::string::npos);
  CHECK(refused([](Tokens& t) { t.batch.layer = 4; }) == "layer 4 is not one of the workers'");
  CHECK(refused([](Tokens& t) { t.batch.hidden_states_stride = 4; }).find("stride is 4") !=
        std::string::npos);
  CHECK(refused([](Tokens& t) { t.batch.hidden_states_stride = ~size_t{0}; }).find("stride is") !=
        std::string::npos);
  CHECK(refused([](Tokens& t) { t.ids[1] = -1; }).find("-1") != std::string::npos);
  CHECK(refused([](Tokens& t) { t.batch.output = nullptr; }).find("no memory") !=
        std::string::npos);
  CHECK(refused([](Tokens& t) { t.batch.top_k = 0; }).find("top_k is 0") != std::string::npos);
  CHECK(dflash_moe_submit(scene.client, nullptr, nullptr) == nullptr);
  CHECK(dflash_moe_submit(nullptr, nullptr, nullptr) == nullptr);
  CHECK(error() == "the client is NULL");
  CHECK(dflash_moe_wait(nullptr, 0) == DFLASH_MOE_INVALID);
  dflash_moe_abandon(nullptr);
  dflash_moe_close(nullptr);
  std::thread([] { CHECK(error().empty()); }).join();  // a text belongs to its thread
}

TEST_CASE("an unfinished call is pending, and an abandoned one writes nothing any more") {
  Scene scene;
  scene.supervisor.workers[0]->is_silent = true;
  Tokens tokens(2);
  dflash_moe_call* call = dflash_moe_submit(scene.client, &tokens.batch, nullptr);
  REQUIRE(call != nullptr);
  CHECK(dflash_moe_wait(call, 0) == DFLASH_MOE_PENDING);
  CHECK(dflash_moe_wait(call, 1'000'000) == DFLASH_MOE_PENDING);
  dflash_moe_abandon(call);
  CHECK(tokens.output[0] == -7);
  dflash_moe_counters counters{};
  counters.struct_bytes = sizeof counters;
  REQUIRE(dflash_moe_count(scene.client, &counters) == DFLASH_MOE_OK);
  CHECK(counters.calls == 1);
  CHECK(counters.failed_calls == 1);
}

TEST_CASE("a call that its worker does not answer ends by its own deadline") {
  Scene scene({.call_timeout_ns = 50'000'000});
  scene.supervisor.workers[0]->is_silent = true;
  Tokens tokens(2);
  CHECK(run(scene.client, tokens) == DFLASH_MOE_TIMEOUT);
  CHECK(error() == Has{"worker w0 did not answer layer blk.5 within"});
}

TEST_CASE("a client that is closed frees its calls, also those that nobody abandoned") {
  auto scene = std::make_unique<Scene>();
  scene->supervisor.workers[0]->is_silent = true;
  Tokens tokens(2);
  CHECK(dflash_moe_submit(scene->client, &tokens.batch, nullptr) != nullptr);
  scene.reset();
  CHECK(tokens.output[0] == -7);
}

TEST_CASE("the end of the supervisor ends the call under way, and refuses later ones") {
  Scene scene;
  scene.supervisor.workers[0]->is_silent = true;
  Tokens tokens(2);
  dflash_moe_call* call = dflash_moe_submit(scene.client, &tokens.batch, nullptr);
  REQUIRE(call != nullptr);
  scene.supervisor.workers[0]->await_requests(1);
  int64_t ended_ns = 0;
  int status = 1;
  std::string text;
  std::thread waiter([&] {
    status = dflash_moe_wait(call, -1);
    ended_ns = now_ns();
    text = error();
  });
  const int64_t hung_up_ns = now_ns();
  scene.supervisor.hang_up();
  waiter.join();
  CHECK(status == DFLASH_MOE_CLOSED);
  CHECK(text == "the supervisor hung up");
  const double took_ms = static_cast<double>(ended_ns - hung_up_ns) / 1e6;
  CAPTURE(took_ms);
  CHECK(took_ms < 5000);  // 100 on a machine that has a core for it; the call had 30 s
  dflash_moe_abandon(call);
  Tokens later(2);
  CHECK(run(scene.client, later) == DFLASH_MOE_CLOSED);
  CHECK(error() == "the supervisor hung up");
}

TEST_CASE("workers that end with their supervisor do not hide that it is gone") {
  Scene scene;
  scene.supervisor.hang_up();
  scene.supervisor.workers.clear();
  Tokens tokens(2);
  CHECK(run(scene.client, tokens) == DFLASH_MOE_CLOSED);
}

TEST_CASE("a message that does not belong ends the client with its text") {
  Scene scene;
  scene.supervisor.send(wire::HandoverReady{});
  await_status(scene, DFLASH_MOE_CLOSED);
  CHECK(error() == "the supervisor sent Ready where it does not belong");
}

TEST_CASE("a worker that hangs up is lost, which the supervisor is told once; then it comes back") {
  Scene scene({.num_workers = 2});
  REQUIRE(scene.works());
  scene.supervisor.workers[1].reset();
  await_status(scene, DFLASH_MOE_WORKER_LOST);
  CHECK(error() == Has{"worker w1 was lost: "});
  const auto gone = scene.supervisor.receive<wire::WorkerGone>().first;
  CHECK(gone.worker == 1);
  CHECK_FALSE(gone.reason.empty());
  await_status(scene, DFLASH_MOE_WORKER_LOST);

  scene.supervisor.connect_worker(1);  // fails where another WorkerGone came first
  await_status(scene, DFLASH_MOE_OK);
  CHECK(scene.works());

  scene.supervisor.workers[1].reset();  // a second loss is told again
  await_status(scene, DFLASH_MOE_WORKER_LOST);
  CHECK(scene.supervisor.receive<wire::WorkerGone>().first.worker == 1);
}

TEST_CASE("a return that fails is told, so that the supervisor tries again") {
  Scene scene;
  scene.supervisor.workers[0].reset();
  await_status(scene, DFLASH_MOE_WORKER_LOST);
  CHECK(scene.supervisor.receive<wire::WorkerGone>().first.worker == 0);
  const wire::PathTermsMessage asked = scene.supervisor.terms(0);
  scene.supervisor.send(asked);
  CHECK(scene.supervisor.receive<wire::PathOffered>().first.generation == asked.generation);
  scene.supervisor.send(wire::PathAnswered{0, asked.generation, {}, 0, false});
  CHECK(scene.supervisor.receive<wire::WorkerGone>().first.worker == 0);
  scene.supervisor.connect_worker(0);
  await_status(scene, DFLASH_MOE_OK);
}

TEST_CASE("a loss that the supervisor tells ends calls with its reason, and is not told back") {
  Scene scene;
  scene.supervisor.workers[0]->is_silent = true;
  Tokens tokens(2);
  dflash_moe_call* call = dflash_moe_submit(scene.client, &tokens.batch, nullptr);
  REQUIRE(call != nullptr);
  scene.supervisor.send(wire::WorkerGone{0, "its process was killed"});
  CHECK(dflash_moe_wait(call, -1) == DFLASH_MOE_WORKER_LOST);
  CHECK(error() == "worker w0 was lost: its process was killed (layer blk.5)");
  dflash_moe_abandon(call);
  scene.supervisor.connect_worker(0);  // fails where a WorkerGone came
  await_status(scene, DFLASH_MOE_OK);
}

TEST_CASE("a worn path is renewed without the program noticing") {
  Scene scene({.call_timeout_ns = 10'000'000'000});
  auto& worker = *scene.supervisor.workers[0];
  worker.is_silent = true;
  for (int i = 1; i <= 2; ++i) {  // two of three slots wait for replies that never come
    Tokens tokens(2);
    dflash_moe_call* call = dflash_moe_submit(scene.client, &tokens.batch, nullptr);
    worker.await_requests(i);
    dflash_moe_abandon(call);
  }
  const auto worn = scene.supervisor.receive<wire::PathWorn>().first;
  CHECK(worn.worker == 0);
  CHECK(worn.reason == "2 of its 3 slots wait for replies that are late");
  bool is_right = false;
  std::thread caller([&] { is_right = scene.works(); });  // waits for the fresh path
  scene.supervisor.connect_worker(0, /*has_pulse=*/false);
  caller.join();
  CHECK(is_right);
}

TEST_CASE("counters reach the supervisor while they change, and at the end") {
  auto scene = std::make_unique<Scene>();
  for (int i = 0; i < 4; ++i) CHECK(scene->works(3));
  const wire::Counted first = scene->supervisor.receive<wire::Counted>().first;
  CHECK(first.calls >= 1);
  CHECK(scene->works(3));
  dflash_moe_counters counters{};
  counters.struct_bytes = sizeof counters;
  REQUIRE(dflash_moe_count(scene->client, &counters) == DFLASH_MOE_OK);
  CHECK(counters.calls == 5);
  CHECK(counters.failed_calls == 0);
  CHECK(counters.messages == 5);
  CHECK(counters.rows == 15);
  CHECK(counters.compute_ns == 5 * 1000);
  CHECK(counters.call_ns > 0);
  // 3 rows there and back in f32, their counts, and a weight and an id for each of 6 pairs
  CHECK(counters.floor_bytes == 5 * (3 * 2 * kWidth * 4 + 3 * 2 + 6 * 6));
  CHECK(counters.request_bytes + counters.reply_bytes > counters.floor_bytes);
  dflash_moe_close(scene->client);
  scene->client = nullptr;
  wire::Counted last;
  for (;;) {
    auto received = scene->supervisor.connection->receive(patience());
    if (!received.ok()) break;
    last = std::get<wire::Counted>(received.value().message);
  }
  CHECK(last.calls == counters.calls);
  CHECK(last.floor_bytes == counters.floor_bytes);
  CHECK(last.call_ns == counters.call_ns);
}

TEST_CASE("a tensor that the program loads is told to the supervisor") {
  Scene scene;
  dflash_moe_report_tensor(scene.client, "blk.5.ffn_up_exps.weight", nullptr);
  dflash_moe_report_tensor(scene.client, "blk.6.ffn_up_exps.weight", "no worker holds it");
  auto seen = scene.supervisor.receive<wire::TensorSeen>().first;
  CHECK(seen.name == "blk.5.ffn_up_exps.weight");
  CHECK(seen.reason.empty());
  seen = scene.supervisor.receive<wire::TensorSeen>().first;
  CHECK(seen.reason == "no worker holds it");
}

TEST_CASE("a forked child that did not open the client is refused, and the parent goes on") {
  Scene scene;
  REQUIRE(scene.works());
  Tokens tokens(2);
  dflash_moe_call* call = dflash_moe_submit(scene.client, &tokens.batch, nullptr);
  REQUIRE(call != nullptr);
  REQUIRE(dflash_moe_wait(call, -1) == DFLASH_MOE_OK);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int failures = 0;
    Tokens other(1);
    int status = DFLASH_MOE_OK;
    failures += dflash_moe_submit(scene.client, &other.batch, &status) != nullptr;
    failures += status != DFLASH_MOE_CLOSED;
    failures +=
        error() != "this client belongs to the parent process; a forked child cannot use it";
    failures += dflash_moe_wait(call, 0) != DFLASH_MOE_CLOSED;
    dflash_moe_abandon(call);
    dflash_moe_close(scene.client);
    ::_exit(failures);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  dflash_moe_abandon(call);
  CHECK(scene.works());
}

TEST_CASE("a program that ends without closing still sends its last counters") {
  SupervisorStandIn supervisor;
  std::cout.flush();  // or the child would write it again
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dflash_moe_client* client = dflash_moe_open(nullptr);
    if (client == nullptr) ::_exit(9);
    Tokens tokens(3);
    for (int i = 0; i < 7; ++i) {
      if (run(client, tokens) != DFLASH_MOE_OK || !tokens.is_right()) ::_exit(8);
    }
    std::exit(0);
  }
  ::close(supervisor.token_fd);
  supervisor.accept();
  supervisor.greet();
  supervisor.connect_worker(0);
  supervisor.send(wire::HandoverReady{});
  wire::Counted last;
  for (;;) {
    auto received = supervisor.connection->receive(patience());
    if (!received.ok()) break;
    last = std::get<wire::Counted>(received.value().message);
  }
  CHECK(last.calls == 7);
  CHECK(last.rows == 21);
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

}  // namespace
}  // namespace dflash::c_interface

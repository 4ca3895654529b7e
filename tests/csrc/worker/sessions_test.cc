// Several sessions of one store at once: their bits, their turns, and what each tells of the time
// in which it waited for the others.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <thread>

#include "failed.h"
#include "wire/payload.h"
#include "worker/scene.h"

namespace dflash::worker {
namespace {

// Computing a toy request takes this worker longer than any test does; stop() cuts it short.
WorkerOptions very_slow() {
  WorkerOptions options;
  options.slowdown = 1e6;
  return options;
}

// A session beside that of a scene, on the same shard.
class Neighbour {
 public:
  explicit Neighbour(Scene& scene, transport::SlotGeometry geometry = {4, 16384, 16384})
      : scene_(scene) {
    worker = ExpertWorker::create({.name = "w1"}).value();
    const store::ShardFacts facts = toy::facts_of(toy_spec(), kNumExperts, kFingerprint);
    REQUIRE(worker->hold(kWhere, toy::borrow(scene.store, facts)).ok());
    auto pair = transport::make_loopback(geometry).value();
    host_ = std::move(pair.host);
    served_ = std::async(std::launch::async, [this, end = std::move(pair.worker)]() mutable {
      return worker->serve(std::move(end), kGeneration);
    });
  }
  ~Neighbour() { CHECK(end().ok()); }

  Status end() {
    if (!served_.valid()) return ok();
    worker->stop(kGeneration);
    REQUIRE(served_.wait_for(std::chrono::milliseconds(kPatienceMs)) == std::future_status::ready);
    return served_.get();
  }
  void send(uint32_t num_rows, uint32_t seed) {
    send(toy::wire_batch(toy_spec(), kNumExperts, num_rows, seed));
  }
  void send(const compute::toy::Batch& batch) {
    const auto message = scene_.request(batch).message();
    std::ranges::copy(message, host_->outgoing(0).begin());
    REQUIRE(host_->publish(0, message.size()).ok());
  }
  std::vector<std::byte> receive() { return answer().payload; }
  Answer answer() {
    transport::WaitEntry entry{host_.get(), std::nullopt, std::nullopt};
    transport::wait_any({&entry, 1}, Deadline::after_ms(kPatienceMs), 0);
    REQUIRE(entry.arrival.has_value());
    const auto bytes = entry.arrival->bytes;
    const auto payload = bytes.subspan(wire::kFrameHeaderBytes);
    return {
        entry.arrival->slot,
        wire::decode_frame_header(bytes.first<wire::kFrameHeaderBytes>()).value(),
        {payload.begin(), payload.end()}
    };
  }

  std::unique_ptr<ExpertWorker> worker;

 private:
  Scene& scene_;
  std::unique_ptr<transport::Channel> host_;
  std::future<Status> served_;
};

std::vector<std::byte> rows_of(const std::vector<std::byte>& payload) {
  return {payload.begin() + wire::kReplyTimingBytes, payload.end()};
}

void wait_until_busy(const ExpertWorker& worker) {
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (worker.stats().busy_since_ns == 0 && !deadline.has_passed()) std::this_thread::yield();
  REQUIRE(worker.stats().busy_since_ns != 0);
}

TEST_CASE("sessions that compute with one shard at once get the bits that each gets alone") {
  Scene scene;
  scene.start();
  CHECK(scene.store.num_shards() == 1);
  std::vector<std::thread> threads;
  for (uint32_t session = 0; session < 3; ++session) {
    threads.emplace_back([&, session] {
      Neighbour neighbour(scene);
      for (uint32_t call = 0; call < 50; ++call) {
        const uint32_t num_rows = 1 + call % 5, seed = 100 * session + call;
        neighbour.send(num_rows, seed);
        const auto batch = toy::wire_batch(toy_spec(), kNumExperts, num_rows, seed);
        CHECK(rows_of(neighbour.receive()) == scene.expected_rows(batch));
      }
      CHECK(neighbour.worker->stats().calls == 50);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(scene.store.num_shards() == 1);
  CHECK(scene.worker->stats().calls == 0);
}

// Sends through two neighbours while the scene's request is computed, so that both wait when it
// ends, and returns what they were answered.
std::array<Answer, 2> ask_together(Neighbour& one, const compute::toy::Batch& of_one,
                                   Neighbour& other, const compute::toy::Batch& of_other,
                                   Scene& scene) {
  const store::ComputeTurns& turns = scene.worker->held(kWhere)->turns();
  const auto wait_for_asking = [&turns](size_t count) {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (turns.num_asking() != count && !deadline.has_passed()) std::this_thread::yield();
    REQUIRE(turns.num_asking() == count);
  };
  scene.send(0, scene.request().message());
  wait_for_asking(1);
  one.send(of_one);
  wait_for_asking(2);
  other.send(of_other);
  wait_for_asking(3);
  CHECK(scene.end().ok());  // which cuts its slowness short
  return {one.answer(), other.answer()};
}

compute::toy::Batch batch_of(uint32_t num_rows, uint32_t seed) {
  return toy::wire_batch(toy_spec(), kNumExperts, num_rows, seed);
}

TEST_CASE(
    "rows of two sessions that wait for one shard are computed together, with their own bits") {
  Scene scene(very_slow());
  scene.start();
  Neighbour one(scene), other(scene);
  const auto answers = ask_together(one, batch_of(3, 11), other, batch_of(2, 12), scene);
  CHECK(rows_of(answers[0].payload) == scene.expected_rows(batch_of(3, 11)));
  CHECK(rows_of(answers[1].payload) == scene.expected_rows(batch_of(2, 12)));
  for (const Neighbour* session : {&one, &other}) {
    const store::BatchCounts own = session->worker->stats().own;
    CHECK(own.batches == 1);
    CHECK(own.rows == 5);
    CHECK(own.sessions == 2);
  }
  CHECK(scene.store.batch_counts().batches == 2);
  CHECK(scene.store.batch_counts().sessions == 3);
  for (const Answer& answer : answers) {
    const auto timing = wire::decode_reply_timing(
        std::span<const std::byte>(answer.payload).first<wire::kReplyTimingBytes>());
    CHECK(timing.behind_ns > 0);
    CHECK(timing.behind_ns <= timing.started_ns - timing.received_ns);
    CHECK(timing.started_ns < timing.finished_ns);
  }
}

TEST_CASE("a batch ends where each expert could have enough rows") {
  constexpr transport::SlotGeometry kLarge{4, 131072, 131072};
  Scene scene(very_slow(), kLarge);
  scene.start();
  Neighbour one(scene, kLarge), other(scene, kLarge);
  // 8 pairs for each of 5 experts are 40, which two requests of 12 rows with some 2 pairs each
  // exceed together.
  const auto answers = ask_together(one, batch_of(12, 11), other, batch_of(12, 12), scene);
  CHECK(rows_of(answers[0].payload) == scene.expected_rows(batch_of(12, 11)));
  CHECK(rows_of(answers[1].payload) == scene.expected_rows(batch_of(12, 12)));
  for (const Neighbour* session : {&one, &other}) {
    const store::BatchCounts own = session->worker->stats().own;
    CHECK(own.batches > 0);
    CHECK(own.sessions == own.batches);
  }
}

TEST_CASE("rows that cannot be computed fail their own session alone") {
  Scene scene(very_slow());
  scene.start();
  Neighbour bad(scene), good(scene);
  compute::toy::Batch bad_rows = batch_of(3, 11), good_rows = batch_of(2, 12);
  bad_rows.reply_dtype = good_rows.reply_dtype = Dtype::kF16;
  for (float& weight : bad_rows.weights) weight = 1e7f;
  const auto answers = ask_together(bad, bad_rows, good, good_rows, scene);
  REQUIRE(answers[0].header.kind == wire::FrameKind::kError);
  CHECK(answers[0].error().code == ErrorCode::kRange);
  CHECK(rows_of(answers[1].payload) == scene.expected_rows(good_rows));
  CHECK(good.worker->stats().own.sessions == 1);
  CHECK(good.worker->stats().errors == 0);
}

TEST_CASE("who waits for another's request goes on counting, and does not call that computing") {
  Scene scene(very_slow());
  scene.start();
  scene.send(0, scene.request().message());
  wait_until_busy(*scene.worker);
  Neighbour neighbour(scene);
  neighbour.send(3, 7);
  wait_until_busy(*neighbour.worker);
  const uint64_t before = neighbour.worker->progress();
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (neighbour.worker->progress() < before + 20 && !deadline.has_passed())
    std::this_thread::yield();
  CHECK(neighbour.worker->progress() >= before + 20);
  CHECK(neighbour.worker->stats().calls == 0);
  CHECK(scene.end().ok());
  neighbour.receive();
  const WorkerStats stats = neighbour.worker->stats();
  CHECK(stats.queue_ns > 10'000'000);  // twenty looks and more, a millisecond apart
  CHECK(stats.compute_ns < stats.queue_ns);
}

TEST_CASE("a session that ends while it waits for its turn ends at once, and the other goes on") {
  Scene scene(very_slow());
  scene.start();
  scene.send(0, scene.request().message());
  wait_until_busy(*scene.worker);
  Neighbour neighbour(scene);
  neighbour.send(3, 7);
  wait_until_busy(*neighbour.worker);
  CHECK(neighbour.end().ok());
  CHECK(scene.worker->stats().busy_since_ns != 0);
  CHECK(scene.end().ok());
  CHECK(scene.worker->stats().calls == 1);
}

constexpr uint32_t kManyRows = 200;
constexpr transport::SlotGeometry kRoomy{4, 131072, 131072};

// Asks `scene` while another session computes by turns with it, again until the other one has asked
// and been answered at least `num_between` times while one request was under way, and returns what
// the scene was answered. The other one may be late on a busy machine.
Answer ask_beside_another(Scene& scene, const std::vector<std::byte>& message,
                          uint64_t num_between) {
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> num_answered{0}, num_within{0};
  std::thread other([&] {
    Neighbour neighbour(scene);
    const auto expected = scene.expected_rows(toy::wire_batch(toy_spec(), kNumExperts, 2, 5));
    while (!is_over) {
      const int64_t busy_since_ns = scene.worker->stats().busy_since_ns;
      neighbour.send(2, 5);
      CHECK(rows_of(neighbour.receive()) == expected);
      if (busy_since_ns != 0 && scene.worker->stats().busy_since_ns == busy_since_ns) ++num_within;
      ++num_answered;
    }
  });
  const Deadline deadline = Deadline::after_ms(2 * kPatienceMs);
  std::optional<Answer> answer;
  while (num_within < num_between && !deadline.has_passed()) {
    const uint64_t before = num_answered;
    while (num_answered == before && !deadline.has_passed()) std::this_thread::yield();
    num_within = 0;
    answer = scene.ask(message);
  }
  is_over = true;
  other.join();
  CHECK(num_within >= num_between);
  REQUIRE(answer.has_value());
  return *answer;
}

TEST_CASE("a long request is cut while another session computes, and its bits are the same") {
  WorkerOptions options;
  options.slowdown = 200;
  Scene scene(options, kRoomy);
  scene.start();
  const auto batch = toy::wire_batch(toy_spec(), kNumExperts, kManyRows, 3);
  const Answer answer = ask_beside_another(scene, scene.request(batch).message(), 3);
  CHECK(rows_of(answer.payload) == scene.expected_rows(batch));
  const auto timing = wire::decode_reply_timing(
      std::span<const std::byte>(answer.payload).first<wire::kReplyTimingBytes>());
  CHECK(timing.received_ns <= timing.started_ns);
  CHECK(timing.started_ns < timing.finished_ns);
}

TEST_CASE("a sum out of range is named by its row in the request, however that was cut") {
  compute::toy::Batch batch = toy::wire_batch(toy_spec(), kNumExperts, kManyRows, 3);
  batch.reply_dtype = Dtype::kF16;
  for (size_t pair = batch.ids.size() - 40; pair < batch.ids.size(); ++pair)
    batch.weights[pair] = 1e7f;
  WorkerOptions options;
  options.slowdown = 200;
  Scene scene(options, kRoomy);
  scene.start();
  const auto message = scene.request(batch).message();
  const Answer alone = scene.ask(message);
  REQUIRE(alone.header.kind == wire::FrameKind::kError);
  CHECK(alone.error().code == ErrorCode::kRange);
  const Answer beside = ask_beside_another(scene, message, 3);
  REQUIRE(beside.header.kind == wire::FrameKind::kError);
  CHECK(beside.error().text == alone.error().text);
}

}  // namespace
}  // namespace dflash::worker

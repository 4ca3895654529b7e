// Sessions of a worker: queued requests, stops, bytes that move while it computes, and what ends a
// session.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "failed.h"
#include "worker/scene.h"

namespace dflash::worker {
namespace {

TEST_CASE("bytes that are no frame end the session with a protocol error") {
  for (const size_t num_bytes : {size_t{64}, size_t{10}, size_t{0}}) {
    CAPTURE(num_bytes);
    Scene scene;
    scene.start();
    scene.send(1, std::vector<std::byte>(num_bytes, std::byte{0x5a}));
    CHECK(scene.wait_end() == Failed(ErrorCode::kProtocol));
  }
}

TEST_CASE("requests queued before the worker looks are all answered in order") {
  Scene scene;
  const auto first = scene.request(1, 1), second = scene.request(2, 2), third = scene.request(3, 3);
  scene.send(2, first.message());
  scene.send(0, second.message());
  scene.send(3, third.message());
  scene.start();
  for (const uint32_t slot : {2u, 0u, 3u}) {
    const auto answer = scene.receive();
    REQUIRE(answer.has_value());
    CHECK(answer->slot == slot);
  }
  CHECK(scene.worker->stats().calls == 3);
}

TEST_CASE("stop ends an idle session at once") {
  Scene scene;
  scene.start();
  scene.ask(scene.request().message());  // serve() is running
  const int64_t before_ns = now_ns();
  scene.worker->stop(kGeneration);
  CHECK(scene.wait_end().ok());
  CHECK(now_ns() - before_ns < 20'000'000'000);  // it takes 50 ms where nothing else runs
}

TEST_CASE("a worker serves a second session after the first was stopped") {
  Scene scene;
  scene.start();
  scene.ask(scene.request().message());
  REQUIRE(scene.end().ok());
  auto pair = transport::make_loopback({2, 16384, 16384}).value();
  auto served = std::async(std::launch::async, [&] {
    return scene.worker->serve(std::move(pair.worker), kGeneration + 1);
  });
  scene.host = std::move(pair.host);
  toy::Request request = scene.request();
  request.header.generation = kGeneration + 1;
  CHECK(scene.ask(request.message()).header.kind == wire::FrameKind::kReply);
  scene.worker->stop(kGeneration);  // of the former session: nothing to this one
  CHECK(scene.ask(request.message()).header.kind == wire::FrameKind::kReply);
  scene.worker->stop(kGeneration + 1);
  CHECK(served.get().ok());
}

TEST_CASE("a session that was stopped before it began ends at once") {
  Scene scene;
  scene.worker->stop(kGeneration);
  scene.start();
  CHECK(scene.wait_end().ok());
}

TEST_CASE(
    "progress advances while the worker has nothing to do, so that a slow link is not a frozen "
    "worker") {
  Scene scene;
  scene.start();
  scene.ask(scene.request().message());
  const uint64_t before = scene.worker->progress();
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (scene.worker->progress() < before + 3 && !deadline.has_passed()) std::this_thread::yield();
  CHECK(scene.worker->progress() >= before + 3);
}

TEST_CASE(
    "an emulated slow worker gives the same bits, takes longer, and keeps its progress counter "
    "moving") {
  WorkerOptions options;
  options.slowdown = 2000;
  Scene scene(options);
  scene.start();
  const compute::toy::Batch batch = toy::wire_batch(toy_spec(), kNumExperts, 3, 1);
  const uint64_t before = scene.worker->progress();
  const Answer answer = scene.ask(scene.request(batch).message());
  const std::vector<std::byte> rows(answer.payload.begin() + wire::kReplyTimingBytes,
                                    answer.payload.end());
  CHECK(rows == scene.expected_rows(batch));
  const int64_t compute_ns = scene.worker->stats().compute_ns;
  CHECK(compute_ns > 2'000'000);  // a microsecond of work, stretched
  CHECK(scene.worker->progress() - before >= static_cast<uint64_t>(compute_ns / 20'000'000));
}

constexpr transport::SlotGeometry kLargeSlots{2, 4 << 20, 4 << 20};

WorkerOptions slow_worker() {
  WorkerOptions options;
  options.slowdown = 8;
  return options;
}

// Sends the second request once the worker computes the first, then only moves bytes until both
// replies are there; by slot.
std::map<uint32_t, wire::ReplyTiming> timings_of(Scene& scene, const std::vector<std::byte>& first,
                                                 const std::vector<std::byte>& second) {
  scene.send(0, first);
  scene.wait_until_busy();
  scene.send(1, second);
  std::map<uint32_t, wire::ReplyTiming> found;
  while (found.size() < 2) {
    const auto answer = scene.receive();
    REQUIRE(answer.has_value());
    REQUIRE(answer->header.kind == wire::FrameKind::kReply);
    found[answer->slot] =
        wire::decode_reply_timing(std::span(answer->payload).first<wire::kReplyTimingBytes>());
  }
  return found;
}

TEST_CASE(
    "a request three times the size of the socket's buffer is taken in while the one before it is "
    "computed") {
  // 0.7 MB; the computation of as many is stretched to a tenth of a second and more
  constexpr uint32_t kRows = 4096;
  Scene scene(slow_worker(), kLargeSlots);
  scene.connect_by_socket();
  scene.start();
  const std::vector<std::byte> large = scene.request(kRows).message();
  const auto timings = timings_of(scene, large, large);
  const int64_t computed_ns = timings.at(0).finished_ns - timings.at(0).started_ns;
  CHECK(computed_ns > 20'000'000);
  CHECK(timings.at(1).received_ns < timings.at(0).finished_ns);
  CHECK(scene.worker->stats().calls == 2);
}

// Writes over the reply's slot whenever the worker moves bytes while it computes, as a process gone
// mad may that shares the memory.
class ScribblingChannel final : public transport::Channel {
 public:
  // `num_scribbles` outlives the channel, which the thread that serves destroys.
  ScribblingChannel(std::unique_ptr<transport::Channel> inner, std::atomic<int>& num_scribbles)
      : inner_(std::move(inner)), num_scribbles_(num_scribbles) {}

  const transport::SlotGeometry& geometry() const override { return inner_->geometry(); }
  const char* kind() const override { return inner_->kind(); }
  std::span<std::byte> outgoing(uint32_t slot) override { return inner_->outgoing(slot); }
  Status publish(uint32_t slot, size_t bytes) override {
    computed_slot_.reset();
    return inner_->publish(slot, bytes);
  }
  Result<std::optional<transport::Arrival>> poll() override {
    if (computed_slot_) {
      std::ranges::fill(inner_->outgoing(*computed_slot_), std::byte{0xa5});
      ++num_scribbles_;
    }
    auto polled = inner_->poll();
    if (polled.ok() && polled.value()) computed_slot_ = polled.value()->slot;
    return polled;
  }
  transport::WakeSource arm(transport::SleepKind kind) override { return inner_->arm(kind); }
  void disarm() override { inner_->disarm(); }
  int64_t next_event_ns() const override { return inner_->next_event_ns(); }

 private:
  const std::unique_ptr<transport::Channel> inner_;
  std::atomic<int>& num_scribbles_;
  std::optional<uint32_t> computed_slot_;
};

TEST_CASE("what is written over a reply's slot before the reply is there changes no bit of it") {
  // A microsecond of work, stretched far beyond the pause between two moves of bytes.
  WorkerOptions options;
  options.slowdown = 2000;
  std::atomic<int> num_scribbles = 0;
  Scene scene(options);
  scene.worker_end =
      std::make_unique<ScribblingChannel>(std::move(scene.worker_end), num_scribbles);
  scene.start();
  const compute::toy::Batch batch = toy::wire_batch(toy_spec(), kNumExperts, 3, 1);
  const Answer answer = scene.ask(scene.request(batch).message());
  CHECK(num_scribbles > 0);
  const std::vector<std::byte> rows(answer.payload.begin() + wire::kReplyTimingBytes,
                                    answer.payload.end());
  CHECK(rows == scene.expected_rows(batch));
}

TEST_CASE("a channel that breaks during a computation ends the session with what broke it") {
  Scene scene(slow_worker(), kLargeSlots);
  scene.connect_by_socket();
  scene.start();
  scene.send(0, scene.request(4096).message());
  scene.wait_until_busy();
  scene.host.reset();
  CHECK(!scene.wait_end().ok());
}

}  // namespace
}  // namespace dflash::worker

// The worker against a host that speaks by hand over loopback: right answers, typed refusals, sessions that end when they must.
// SPDX-License-Identifier: Apache-2.0
#include "worker/expert_worker.h"

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "compute/reference/reference.h"
#include "transport/loopback/loopback.h"
#include "transport/stream/stream.h"
#include "worker/request.h"

namespace dflash::worker {
namespace {

constexpr uint64_t kGeneration = 7;
constexpr uint64_t kFingerprint = 0x1234'5678'9abc'def0;
constexpr uint32_t kNumExperts = 5;
constexpr LayerShard kWhere{3, 2};
constexpr int64_t kPatienceMs = 20'000;  // far above what any step takes, sanitizers and a loaded machine included

compute::FfnSpec toy_spec() {
  compute::FfnSpec spec;
  spec.in_size = 40;
  spec.intermediate_size = 24;
  spec.out_size = 36;
  return spec;
}

// A reply as it arrived, copied out of the slot.
struct Answer {
  uint32_t slot = 0;
  wire::FrameHeader header;
  std::vector<std::byte> payload;

  wire::RemoteError error() const { return wire::decode_error(payload).value(); }
};

// One worker, one loaded shard, one session in a thread of its own.
class Scene {
 public:
  explicit Scene(WorkerOptions options = {}, transport::SlotGeometry geometry = {4, 16384, 16384}, bool loads = true) {
    options.name = "w1";
    worker = ExpertWorker::create(options).value();
    REQUIRE(worker->define_shard(kWhere, toy_spec(), kNumExperts, Dtype::kF32, kFingerprint).ok());
    for (uint32_t id = 0; loads && id < kNumExperts; ++id) REQUIRE(worker->load_expert(kWhere, id, experts.weights(id)).ok());
    auto pair = transport::make_loopback(geometry).value();
    host = std::move(pair.host);
    worker_end = std::move(pair.worker);
  }
  ~Scene() { static_cast<void>(end()); }

  void start() {
    served_ = std::async(std::launch::async, [this] { return worker->serve(std::move(worker_end), kGeneration); });
  }
  Status end() {
    if (outcome_) return *outcome_;
    if (!served_.valid()) return ok();
    worker->stop(kGeneration);
    return wait_end();
  }
  Status wait_end() {
    REQUIRE(served_.wait_for(std::chrono::milliseconds(kPatienceMs)) == std::future_status::ready);
    outcome_ = served_.get();
    return *outcome_;
  }

  void send(uint32_t slot, const std::vector<std::byte>& message) {
    std::ranges::copy(message, host->outgoing(slot).begin());  // memcpy of an empty message would take a null pointer
    REQUIRE(host->publish(slot, message.size()).ok());
  }
  std::optional<Answer> receive(int64_t patience_ms = kPatienceMs) {
    transport::WaitEntry entry{host.get(), std::nullopt, std::nullopt};
    transport::wait_any({&entry, 1}, Deadline::after_ms(patience_ms), 0);
    if (!entry.arrival) return std::nullopt;
    Answer answer;
    answer.slot = entry.arrival->slot;
    answer.header = wire::decode_frame_header(entry.arrival->bytes.first<wire::kFrameHeaderBytes>()).value();
    const auto payload = entry.arrival->bytes.subspan(wire::kFrameHeaderBytes);
    answer.payload.assign(payload.begin(), payload.end());
    CHECK(answer.header.payload_bytes == payload.size());
    CHECK(answer.header.payload_checksum == checksum(payload));
    return answer;
  }
  // Takes a Unix socket instead of loopback, where bytes move only as long as somebody moves them.
  void connect_by_socket() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const transport::SlotGeometry geometry = host->geometry();
    host = transport::make_stream_channel(transport::Side::kHost, geometry, OwnedFd(ends[0]), {}).value();
    worker_end = transport::make_stream_channel(transport::Side::kWorker, geometry, OwnedFd(ends[1]), {}).value();
  }
  // Moves bytes until the worker has begun to compute.
  void wait_until_busy() {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (worker->stats().busy_since_ns == 0 && !deadline.has_passed()) REQUIRE(host->poll().ok());
    REQUIRE(worker->stats().busy_since_ns != 0);
  }
  Answer ask(const std::vector<std::byte>& message) {
    send(0, message);
    auto answer = receive();
    REQUIRE(answer.has_value());
    return *answer;
  }

  toy::Request request(const compute::toy::Batch& batch) const {
    toy::Request made = toy::make_request(batch, toy_spec());
    made.header.generation = kGeneration;
    made.header.call_id = 99;
    made.header.weights_fingerprint = kFingerprint;
    made.header.layer = kWhere.layer;
    made.header.shard = kWhere.shard;
    made.header.slice = 4;
    made.header.attempt = 1;
    return made;
  }
  toy::Request request(uint32_t num_rows = 3, uint32_t seed = 1) const {
    return request(toy::wire_batch(toy_spec(), kNumExperts, num_rows, seed));
  }
  std::vector<std::byte> expected_rows(const compute::toy::Batch& batch) const {
    auto layer = compute::make_reference_layer(toy_spec(), kNumExperts);
    REQUIRE(experts.load_into(*layer).ok());
    std::vector<std::byte> reply;
    REQUIRE(batch.run(*layer, reply).ok());
    return reply;
  }

  compute::toy::Experts experts{toy_spec(), kNumExperts, Dtype::kF32, 11};
  std::unique_ptr<ExpertWorker> worker;
  std::unique_ptr<transport::Channel> host, worker_end;

 private:
  std::future<Status> served_;
  std::optional<Status> outcome_;
};

TEST_CASE("replies hold the reference's bits for every pair of wire dtypes and echo the request's identity") {
  Scene scene;
  scene.start();
  for (const Dtype request_dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    for (const Dtype reply_dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      compute::toy::Batch batch = toy::wire_batch(toy_spec(), kNumExperts, 6, 5);
      batch.row_dtype = request_dtype;
      batch.reply_dtype = reply_dtype;
      const toy::Request request = scene.request(batch);
      const Answer answer = scene.ask(request.message());
      REQUIRE(answer.header.kind == wire::FrameKind::kReply);
      CHECK(answer.header.call_id == 99);
      CHECK(answer.header.weights_fingerprint == kFingerprint);
      CHECK(answer.header.generation == kGeneration);
      CHECK(answer.header.layer == kWhere.layer);
      CHECK(answer.header.shard == kWhere.shard);
      CHECK(answer.header.slice == 4);
      CHECK(answer.header.attempt == 1);
      CHECK(answer.header.num_rows == request.header.num_rows);
      CHECK(answer.header.num_pairs == request.header.num_pairs);
      const std::vector<std::byte> rows(answer.payload.begin() + wire::kReplyTimingBytes, answer.payload.end());
      CHECK(rows == scene.expected_rows(batch));
    }
  }
  CHECK(scene.end().ok());
}

TEST_CASE("the timing in a reply is in order and compute time reaches the counters") {
  Scene scene;
  scene.start();
  const toy::Request request = scene.request();
  const Answer answer = scene.ask(request.message());
  const wire::ReplyTiming timing =
      wire::decode_reply_timing(std::span(answer.payload).first<wire::kReplyTimingBytes>());
  CHECK(timing.received_ns > 0);
  CHECK(timing.received_ns <= timing.started_ns);
  CHECK(timing.started_ns <= timing.finished_ns);
  REQUIRE(scene.end().ok());
  const WorkerStats stats = scene.worker->stats();
  CHECK(stats.calls == 1);
  CHECK(stats.rows == request.header.num_rows);
  CHECK(stats.pairs == request.header.num_pairs);
  CHECK(stats.errors == 0);
  CHECK(stats.request_bytes == request.message().size());
  CHECK(stats.reply_bytes == wire::kFrameHeaderBytes + answer.payload.size());
  CHECK(stats.compute_ns > 0);
  CHECK(stats.busy_since_ns == 0);
}

struct BadRequest {
  const char* what;
  std::function<void(toy::Request&)> spoil;
  const char* message_part;
};

const BadRequest kBadRequests[] = {
    {"a layer it does not hold", [](toy::Request& r) { r.header.layer = 9; }, "layer 9"},
    {"a shard it does not hold", [](toy::Request& r) { r.header.shard = 3; }, "shard 3"},
    {"other weights", [](toy::Request& r) { r.header.weights_fingerprint ^= 1; }, "fingerprint"},
    {"a flipped payload bit", [](toy::Request& r) { r.payload.back() ^= std::byte{1}; }, "checksum"},
    {"a payload for other counts", [](toy::Request& r) { r.header.num_rows -= 1; }, "payload_bytes"},
    {"a local id beyond the shard",
     [](toy::Request& r) {
       r.payload[r.layout(toy_spec().in_size).local_ids_offset] = std::byte{kNumExperts};
       r.seal();
     },
     "local_expert_ids"},
    {"a row without pairs",
     [](toy::Request& r) {
       r.payload[r.layout(toy_spec().in_size).row_counts_offset] = std::byte{0};
       r.seal();
     },
     "row_counts"},
};

TEST_CASE("a bad request that is a frame gets a protocol error and the session goes on") {
  Scene scene;
  scene.start();
  uint64_t errors = 0;
  for (const BadRequest& bad : kBadRequests) {
    CAPTURE(bad.what);
    toy::Request request = scene.request();
    bad.spoil(request);
    const Answer answer = scene.ask(request.message());
    REQUIRE(answer.header.kind == wire::FrameKind::kError);
    CHECK(answer.error().code == ErrorCode::kProtocol);
    CHECK_MESSAGE(answer.error().text.find(bad.message_part) != std::string::npos, answer.error().text);
    CHECK(answer.header.call_id == 99);
    CHECK(answer.header.num_rows == 0);
    CHECK(scene.worker->stats().errors == ++errors);
  }
  CHECK(scene.ask(scene.request().message()).header.kind == wire::FrameKind::kReply);
}

TEST_CASE("a reply that cannot fit the agreed slot is refused before anything is computed") {
  Scene scene({}, {2, 16384, 2048});
  scene.start();
  const Answer answer = scene.ask(scene.request(20).message());
  REQUIRE(answer.header.kind == wire::FrameKind::kError);
  CHECK(answer.error().text.find("slot") != std::string::npos);
  CHECK(scene.worker->stats().compute_ns == 0);
}

TEST_CASE("an expert that was not loaded is an error, not a number") {
  Scene scene({}, {4, 16384, 16384}, false);
  scene.start();
  const Answer answer = scene.ask(scene.request().message());
  REQUIRE(answer.header.kind == wire::FrameKind::kError);
  CHECK(answer.error().code == ErrorCode::kInvalidArgument);
}

TEST_CASE("a sum that the reply dtype cannot hold is a range error") {
  Scene scene;
  scene.start();
  compute::toy::Batch batch = toy::wire_batch(toy_spec(), kNumExperts, 2, 3);
  for (float& weight : batch.weights) weight = 1e7f;
  batch.reply_dtype = Dtype::kF16;
  const Answer answer = scene.ask(scene.request(batch).message());
  REQUIRE(answer.header.kind == wire::FrameKind::kError);
  CHECK(answer.error().code == ErrorCode::kRange);
}

TEST_CASE("bytes that are no frame end the session with a protocol error") {
  for (const size_t num_bytes : {size_t{64}, size_t{10}, size_t{0}}) {
    CAPTURE(num_bytes);
    Scene scene;
    scene.start();
    scene.send(1, std::vector<std::byte>(num_bytes, std::byte{0x5a}));
    const Status outcome = scene.wait_end();
    REQUIRE(!outcome.ok());
    CHECK(outcome.error().code == ErrorCode::kProtocol);
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
  CHECK(now_ns() - before_ns < 2'000'000'000);  // 50 ms, and room for a loaded machine
}

TEST_CASE("a worker serves a second session after the first was stopped") {
  Scene scene;
  scene.start();
  scene.ask(scene.request().message());
  REQUIRE(scene.end().ok());
  auto pair = transport::make_loopback({2, 16384, 16384}).value();
  auto served = std::async(std::launch::async, [&] { return scene.worker->serve(std::move(pair.worker), kGeneration + 1); });
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

TEST_CASE("progress advances while the worker has nothing to do, so that a slow link is not a frozen worker") {
  Scene scene;
  scene.start();
  scene.ask(scene.request().message());
  const uint64_t before = scene.worker->progress();
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  while (scene.worker->progress() < before + 3 && !deadline.has_passed()) std::this_thread::yield();
  CHECK(scene.worker->progress() >= before + 3);
}

TEST_CASE("an emulated slow worker gives the same bits, takes longer, and keeps its progress counter moving") {
  WorkerOptions options;
  options.slowdown = 2000;
  Scene scene(options);
  scene.start();
  const compute::toy::Batch batch = toy::wire_batch(toy_spec(), kNumExperts, 3, 1);
  const uint64_t before = scene.worker->progress();
  const Answer answer = scene.ask(scene.request(batch).message());
  const std::vector<std::byte> rows(answer.payload.begin() + wire::kReplyTimingBytes, answer.payload.end());
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

// Sends the second request once the worker computes the first, then only moves bytes until both replies are there; by slot.
std::map<uint32_t, wire::ReplyTiming> timings_of(Scene& scene, const std::vector<std::byte>& first, const std::vector<std::byte>& second) {
  scene.send(0, first);
  scene.wait_until_busy();
  scene.send(1, second);
  std::map<uint32_t, wire::ReplyTiming> found;
  while (found.size() < 2) {
    const auto answer = scene.receive();
    REQUIRE(answer.has_value());
    REQUIRE(answer->header.kind == wire::FrameKind::kReply);
    found[answer->slot] = wire::decode_reply_timing(std::span(answer->payload).first<wire::kReplyTimingBytes>());
  }
  return found;
}

TEST_CASE("a request three times the size of the socket's buffer is taken in while the one before it is computed") {
  constexpr uint32_t kRows = 4096;  // 0.7 MB; the computation of as many is stretched to a tenth of a second and more
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

TEST_CASE("a channel that breaks during a computation ends the session with what broke it") {
  Scene scene(slow_worker(), kLargeSlots);
  scene.connect_by_socket();
  scene.start();
  scene.send(0, scene.request(4096).message());
  scene.wait_until_busy();
  scene.host.reset();
  CHECK(!scene.wait_end().ok());
}

TEST_CASE("loading refuses what does not fit and says where") {
  Scene scene;
  const auto spec = toy_spec();
  CHECK(!scene.worker->define_shard(kWhere, spec, kNumExperts, Dtype::kF32, 1).ok());
  CHECK(!scene.worker->define_shard({4, 0}, spec, 0, Dtype::kF32, 1).ok());
  CHECK(!scene.worker->define_shard({4, 0}, spec, 65536, Dtype::kF32, 1).ok());
  compute::FfnSpec bad = spec;
  bad.in_size = 0;
  CHECK(!scene.worker->define_shard({4, 0}, bad, 1, Dtype::kF32, 1).ok());
  const Status nowhere = scene.worker->load_expert({8, 1}, 0, scene.experts.weights(0));
  REQUIRE(!nowhere.ok());
  CHECK(nowhere.error().message.find("layer 8, shard 1") != std::string::npos);
  CHECK(!scene.worker->load_expert(kWhere, kNumExperts, scene.experts.weights(0)).ok());
  CHECK(scene.worker->resident_bytes() > 0);
}

TEST_CASE("a slowdown below one is refused") {
  for (const double slowdown : {0.5, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    WorkerOptions options;
    options.slowdown = slowdown;
    CHECK(!ExpertWorker::create(options).ok());
  }
}

}  // namespace
}  // namespace dflash::worker

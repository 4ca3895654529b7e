// The worker against a host that speaks by hand over loopback: right answers, typed refusals, and
// what loading refuses.
// SPDX-License-Identifier: Apache-2.0
#include "worker/expert_worker.h"

#include <doctest/doctest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "failed.h"
#include "worker/scene.h"

namespace dflash::worker {
namespace {

TEST_CASE(
    "replies hold the reference's bits for every pair of wire dtypes and echo the request's "
    "identity") {
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
      const std::vector<std::byte> rows(answer.payload.begin() + wire::kReplyTimingBytes,
                                        answer.payload.end());
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
    {"a layer it does not hold",    [](toy::Request& r) { r.header.layer = 9; },                "layer 9"         },
    {"a shard it does not hold",    [](toy::Request& r) { r.header.shard = 3; },                "shard 3"         },
    {"other weights",               [](toy::Request& r) { r.header.weights_fingerprint ^= 1; }, "fingerprint"     },
    {"a flipped payload bit",       [](toy::Request& r) { r.payload.back() ^= std::byte{1}; },
     "checksum"                                                                                                   },
    {"a payload for other counts",  [](toy::Request& r) { r.header.num_rows -= 1; },
     "payload_bytes"                                                                                              },
    {"a local id beyond the shard",
     [](toy::Request& r) {
       r.payload[r.layout(toy_spec().in_size).local_ids_offset] = std::byte{kNumExperts};
       r.seal();
     },                                                                                         "local_expert_ids"},
    {"a row without pairs",
     [](toy::Request& r) {
       r.payload[r.layout(toy_spec().in_size).row_counts_offset] = std::byte{0};
       r.seal();
     },                                                                                         "row_counts"      },
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
    CHECK_MESSAGE(answer.error().text.find(bad.message_part) != std::string::npos,
                  answer.error().text);
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
  CHECK(answer.error().text == Has{"slot"});
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

TEST_CASE("what is held twice is refused, and what is given back can be held again") {
  Scene scene;
  const auto again = scene.worker->held(kWhere);
  REQUIRE(again != nullptr);
  const Status refused = scene.worker->hold(kWhere, again);
  REQUIRE(!refused.ok());
  CHECK(refused.error().message == "layer 3, shard 2 is already held");
  CHECK(scene.worker->held({8, 1}) == nullptr);
  scene.worker->give_back();
  CHECK(scene.worker->held(kWhere) == nullptr);
  CHECK(scene.worker->hold(kWhere, again).ok());
}

TEST_CASE("a session that gives its shards back frees them") {
  Scene scene;
  CHECK(scene.store.resident_bytes() > 0);
  scene.store.drop_unborrowed();
  CHECK(scene.store.num_shards() == 1);
  scene.worker->give_back();
  scene.store.drop_unborrowed();
  CHECK(scene.store.num_shards() == 0);
  CHECK(scene.store.resident_bytes() == 0);
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

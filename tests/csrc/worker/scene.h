// One worker with one loaded shard, and the host's end of its channel in the test's hands.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include "compute/reference/reference.h"
#include "transport/loopback/loopback.h"
#include "transport/stream/stream.h"
#include "worker/expert_worker.h"
#include "worker/loans.h"
#include "worker/request.h"

namespace dflash::worker {

inline constexpr uint64_t kGeneration = 7;
inline constexpr uint64_t kFingerprint = 0x1234'5678'9abc'def0;
inline constexpr uint32_t kNumExperts = 5;
inline constexpr LayerShard kWhere{3, 2};
// far above what any step takes, sanitizers and a loaded machine included
inline constexpr int64_t kPatienceMs = 20'000;

inline compute::FfnSpec toy_spec() {
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
  explicit Scene(WorkerOptions options = {}, transport::SlotGeometry geometry = {4, 16384, 16384},
                 bool loads = true) {
    options.name = "w1";
    worker = ExpertWorker::create(options).value();
    const store::ShardFacts facts = toy::facts_of(toy_spec(), kNumExperts, kFingerprint);
    auto loan = loads ? toy::borrow_loaded(store, facts, experts) : toy::borrow(store, facts);
    REQUIRE(worker->hold(kWhere, std::move(loan)).ok());
    auto pair = transport::make_loopback(geometry).value();
    host = std::move(pair.host);
    worker_end = std::move(pair.worker);
  }
  ~Scene() { static_cast<void>(end()); }

  void start() {
    served_ = std::async(std::launch::async,
                         [this] { return worker->serve(std::move(worker_end), kGeneration); });
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
    // memcpy of an empty message would take a null pointer
    std::ranges::copy(message, host->outgoing(slot).begin());
    REQUIRE(host->publish(slot, message.size()).ok());
  }
  std::optional<Answer> receive(int64_t patience_ms = kPatienceMs) {
    transport::WaitEntry entry{host.get(), std::nullopt, std::nullopt};
    transport::wait_any({&entry, 1}, Deadline::after_ms(patience_ms), 0);
    if (!entry.arrival) return std::nullopt;
    Answer answer;
    answer.slot = entry.arrival->slot;
    answer.header =
        wire::decode_frame_header(entry.arrival->bytes.first<wire::kFrameHeaderBytes>()).value();
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
    host = transport::make_stream_channel(transport::Side::kHost, geometry, OwnedFd(ends[0]), {})
               .value();
    worker_end =
        transport::make_stream_channel(transport::Side::kWorker, geometry, OwnedFd(ends[1]), {})
            .value();
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
  store::ShardStore store{toy::processor()};
  std::unique_ptr<ExpertWorker> worker;
  std::unique_ptr<transport::Channel> host, worker_end;

 private:
  std::future<Status> served_;
  std::optional<Status> outcome_;
};

}  // namespace dflash::worker

// A host without Python: this program links client, transport, wire and base, and nothing else. It
// plans the slots, gets channel, pulse, layers and shards as plain values, and calls a worker in
// another process over shared memory.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "client/expert_client.h"
#include "client/slot_plan.h"
#include "scaling_worker.h"
#include "transport/shared/segment.h"
#include "wire/frame.h"

namespace dflash {
namespace {

constexpr uint64_t kGeneration = 11;
constexpr uint32_t kWidth = 48, kNumExperts = 8, kTopK = 2, kLayer = 5;
constexpr uint64_t kFingerprint = 77;

template <class T>
T take(Result<T> result) {
  REQUIRE_MESSAGE(result.ok(), (result.ok() ? std::string() : result.error().message));
  return std::move(result).value();
}

transport::Segment attach(const transport::Segment& segment, transport::Side writer,
                          const transport::SlotGeometry& geometry) {
  return take(
      transport::Segment::attach(OwnedFd(::dup(segment.fd())), writer, geometry, kGeneration));
}

// The worker's process: answers until the host hangs up its pulse, never longer than a minute.
[[noreturn]] void serve(std::unique_ptr<transport::Channel> channel, OwnedFd pulse) {
  const Deadline deadline = Deadline::after_ms(60'000);
  for (uint64_t counter = 1; !deadline.has_passed(); ++counter) {
    std::array<std::byte, wire::kPulseBytes> bytes;
    wire::encode_pulse(counter, bytes);
    if (::send(pulse.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0 &&
        errno == EPIPE)
      ::_exit(0);
    transport::WaitEntry entry{channel.get(), std::nullopt, std::nullopt};
    transport::wait_any({&entry, 1}, Deadline::after_ms(20), 0);
    if (entry.error) ::_exit(0);
    if (!entry.arrival) continue;
    const auto message = entry.arrival->bytes;
    const auto header = wire::decode_frame_header(message.first<wire::kFrameHeaderBytes>());
    if (!header.ok()) ::_exit(2);
    const auto slot = channel->outgoing(entry.arrival->slot);
    const size_t reply_bytes =
        answer(header.value(), message.subspan(wire::kFrameHeaderBytes), slot, kWidth);
    if (!channel->publish(entry.arrival->slot, reply_bytes).ok()) ::_exit(3);
  }
  ::_exit(1);
}

// Everything that somebody who starts workers hands over to a host.
struct HandOver {
  client::NewWorker worker;
  client::LayerPlan layer;
  pid_t pid = 0;
};

HandOver start_worker(const client::SlicePlan& slices, const client::SlotPlan& slots) {
  const transport::SlotGeometry geometry = slots.geometry();
  auto requests = take(transport::Segment::create(transport::Side::kHost, geometry, kGeneration));
  auto replies = take(transport::Segment::create(transport::Side::kWorker, geometry, kGeneration));
  int pulse[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pulse) == 0);
  OwnedFd bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  HandOver made;
  made.pid = ::fork();
  REQUIRE(made.pid >= 0);
  if (made.pid == 0) {
    ::close(pulse[0]);
    auto peer = attach(requests, transport::Side::kHost, geometry);
    serve(
        take(transport::make_shared_channel(transport::Side::kWorker, geometry, std::move(replies),
                                            std::move(peer), std::move(bell))),
        OwnedFd(pulse[1]));
  }
  ::close(pulse[1]);
  auto peer = attach(replies, transport::Side::kWorker, geometry);
  made.worker.name = "w0";
  made.worker.path.channel = take(transport::make_shared_channel(
      transport::Side::kHost, geometry, std::move(requests), std::move(peer), std::move(bell)));
  made.worker.path.generation = kGeneration;
  made.worker.pulse = OwnedFd(pulse[0]);
  made.worker.policy = {slices.slice_tokens, slices.window, slices.is_measured()};
  std::vector<uint32_t> experts(kNumExperts);
  std::iota(experts.begin(), experts.end(), 0u);
  made.layer = {kLayer,      "model.layers.5.mlp.experts",
                kWidth,      kWidth,
                kNumExperts, {{0, 0, kFingerprint, std::move(experts)}}};
  return made;
}

TEST_CASE("a program without Python calls a worker in another process") {
  const client::ShardShape shape{kWidth, kWidth, kTopK, kNumExperts};
  const auto slices = take(client::plan_slices(client::Mode::kAuto, {256, 4, 32}));
  const std::vector<std::vector<client::ShardShape>> workers = {{shape}};
  const auto slots = take(client::plan_arena(workers, slices, Dtype::kF32, Dtype::kF32));
  HandOver given = start_worker(slices, slots.front());
  {
    client::ExpertClient client{client::ClientOptions(30'000'000'000, 2'000'000'000)};
    REQUIRE(client.add_worker(std::move(given.worker)).value() == 0);
    REQUIRE(client.define_layer(given.layer).ok());
    for (const uint32_t num_tokens : {1u, 3u, 700u}) {
      std::vector<float> hidden(num_tokens * kWidth), output(hidden.size(), -1.0f);
      std::iota(hidden.begin(), hidden.end(), 0.0f);
      std::vector<int32_t> ids(num_tokens * kTopK);
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % kNumExperts);
      const std::vector<float> weights(ids.size(), 0.25f);
      TokenBatch batch;
      batch.hidden_states = reinterpret_cast<const std::byte*>(hidden.data());
      batch.row_stride_bytes = kWidth * sizeof(float);
      batch.num_tokens = num_tokens;
      batch.top_k = kTopK;
      batch.topk_ids = ids.data();
      batch.topk_weights = reinterpret_cast<const std::byte*>(weights.data());
      batch.output = reinterpret_cast<std::byte*>(output.data());
      const client::CallPtr call = take(client.submit(batch, kLayer));
      REQUIRE(client.wait(call, Deadline::after_ms(30'000)));
      const Status outcome = client.outcome(call);
      REQUIRE_MESSAGE(outcome.ok(), (outcome.ok() ? "" : outcome.error().message));
      for (size_t i = 0; i < hidden.size(); ++i) REQUIRE(output[i] == 0.5f * hidden[i]);
    }
    CHECK(client.counters().front().counters.rows == 704);
    CHECK(client.workers().front().path == client::PathState::kInUse);
  }
  int status = 0;
  REQUIRE(::waitpid(given.pid, &status, 0) == given.pid);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace dflash

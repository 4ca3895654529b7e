// A client whose workers are puppets: the test plays the worker's end of each loopback channel by
// hand and can say anything. An honest puppet answers each row with the row itself, so a call's
// result is every token's hidden state times the number of shards that hold one of its experts.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "client/expert_client.h"
#include "transport/loopback/loopback.h"
#include "wire/frame.h"
#include "wire/payload.h"

namespace dflash::client {

inline constexpr uint32_t kWidth = 16;       // of rows, in and out
inline constexpr uint32_t kExpertsEach = 2;  // experts of a shard; shard i is on worker i
inline constexpr uint32_t kLayer = 3, kShard = 1;
inline constexpr uint64_t kGeneration = 5;
inline constexpr int64_t kPatienceMs = 20'000;  // of anything that should take milliseconds

// A message as it lies in a slot, taken apart.
struct Message {
  Message() = default;
  explicit Message(const transport::Arrival& arrival)
      : slot(arrival.slot),
        header(wire::decode_frame_header(arrival.bytes.first<wire::kFrameHeaderBytes>()).value()),
        payload(arrival.bytes.begin() + wire::kFrameHeaderBytes, arrival.bytes.end()) {}

  uint32_t slot = 0;
  wire::FrameHeader header;
  std::vector<std::byte> payload;

  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all(wire::kFrameHeaderBytes + payload.size());
    wire::encode_frame_header(header, std::span(all).first<wire::kFrameHeaderBytes>());
    std::memcpy(all.data() + wire::kFrameHeaderBytes, payload.data(), payload.size());
    return all;
  }
  void seal() {
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    header.payload_checksum = checksum(payload);
  }
};

struct Puppet {
  std::unique_ptr<transport::Channel> channel;
  OwnedFd pulse;  // the worker's end; closed where the scene has no pulses

  std::optional<Message> try_take() {
    auto polled = channel->poll();
    REQUIRE(polled.ok());
    if (!polled.value()) return std::nullopt;
    Message message(*polled.value());
    CHECK(message.header.payload_checksum == checksum(message.payload));
    return message;
  }
  Message take() {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (!deadline.has_passed()) {
      if (auto message = try_take()) return *message;
    }
    FAIL("no request came");
    return {};
  }
  void send(uint32_t slot, const std::vector<std::byte>& bytes) {
    std::copy(bytes.begin(), bytes.end(), channel->outgoing(slot).begin());
    REQUIRE(channel->publish(slot, bytes.size()).ok());
  }
  void send(const Message& message) { send(message.slot, message.bytes()); }
  void send_pulse(uint64_t counter) {
    std::array<std::byte, wire::kPulseBytes> bytes;
    wire::encode_pulse(counter, bytes);
    REQUIRE(::send(pulse.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
            wire::kPulseBytes);
  }
};

// The honest answer to a request in f32: its rows.
inline Message echo(const Message& request) {
  const auto layout = wire::RequestLayout::of(request.header.num_rows, request.header.num_pairs,
                                              kWidth, Dtype::kF32)
                          .value();
  Message reply = request;
  reply.header.kind = wire::FrameKind::kReply;
  reply.payload.assign(wire::kReplyTimingBytes, std::byte{0});
  wire::encode_reply_timing({10, 20, 50},
                            std::span(reply.payload).first<wire::kReplyTimingBytes>());
  reply.payload.insert(reply.payload.end(),
                       request.payload.begin() + static_cast<std::ptrdiff_t>(layout.rows_offset),
                       request.payload.end());
  reply.seal();
  return reply;
}

inline Message refusal(const Message& request, const Error& error) {
  Message reply = request;
  reply.header.kind = wire::FrameKind::kError;
  reply.header.num_rows = reply.header.num_pairs = 0;
  reply.payload.resize(wire::kMaxErrorPayloadBytes);
  reply.payload.resize(
      wire::encode_error(error, std::span(reply.payload).first<wire::kMaxErrorPayloadBytes>()));
  reply.seal();
  return reply;
}

// A batch and its output; token t asks for the experts the test names.
struct Tokens {
  Tokens(std::initializer_list<std::initializer_list<int32_t>> experts)
      : top_k(static_cast<uint32_t>(experts.begin()->size())) {
    for (size_t token = 0; token < experts.size(); ++token) {
      ids.insert(ids.end(), experts.begin()[token].begin(), experts.begin()[token].end());
      for (uint32_t i = 0; i < kWidth; ++i) hidden.push_back(static_cast<float>(token * 100 + i));
    }
    weights.assign(ids.size(), 1.0f);
    output.assign(hidden.size(), -7.0f);
  }
  TokenBatch batch() {
    TokenBatch b;
    b.hidden_states = reinterpret_cast<const std::byte*>(hidden.data());
    b.row_stride_bytes = kWidth * sizeof(float);
    b.num_tokens = static_cast<uint32_t>(hidden.size() / kWidth);
    b.top_k = top_k;
    b.topk_ids = ids.data();
    b.topk_weights = reinterpret_cast<const std::byte*>(weights.data());
    b.output = reinterpret_cast<std::byte*>(output.data());
    return b;
  }
  bool is_untouched() const { return output == std::vector<float>(output.size(), -7.0f); }
  // Whether every token's output is its hidden state times its number of shards.
  bool is_right() const {
    for (size_t token = 0; token < hidden.size() / kWidth; ++token) {
      uint64_t shards = 0;
      for (uint32_t k = 0; k < top_k; ++k)
        shards |= uint64_t{1} << (ids[token * top_k + k] / static_cast<int32_t>(kExpertsEach));
      const auto factor = static_cast<float>(__builtin_popcountll(shards));
      for (size_t i = token * kWidth; i < (token + 1) * kWidth; ++i) {
        if (output[i] != factor * hidden[i]) return false;
      }
    }
    return true;
  }

  std::vector<float> hidden, weights, output;
  std::vector<int32_t> ids;
  uint32_t top_k;
};

struct SceneOptions {
  uint32_t num_workers = 2;
  transport::SlotGeometry geometry{3, 4096, 4096};  // as data paths have: window + 1
  SlicePolicy policy{64, 2};
  bool has_pulses = false;
  ClientOptions client{30'000'000'000, 2'000'000'000};
  // The worker that is asked only where no other can be.
  std::optional<uint32_t> last_resort = std::nullopt;
};

// With a call's longest time.
inline SceneOptions with_deadline(int64_t timeout_ms) {
  SceneOptions options;
  options.client.call_timeout_ns = timeout_ms * 1'000'000;
  return options;
}

class PuppetScene {
 public:
  explicit PuppetScene(const SceneOptions& options = {}) : client(options.client) {
    LayerPlan plan;
    plan.layer = kLayer;
    plan.name = "model.layers.3.mlp.experts";
    plan.in_size = plan.out_size = kWidth;
    plan.num_experts = options.num_workers * kExpertsEach;
    for (uint32_t i = 0; i < options.num_workers; ++i) {
      add_worker(i, options);
      plan.shards.push_back(ShardPlace{
          i, i, 900 + i, {i * kExpertsEach, i * kExpertsEach + 1}
      });
    }
    REQUIRE(client.define_layer(plan).ok());
  }

  CallPtr submit(Tokens& tokens) { return client.submit(tokens.batch(), kLayer).value(); }
  // Waits for the end and returns it.
  Status finish(const CallPtr& call) {
    REQUIRE(client.wait(call, Deadline::after_ms(kPatienceMs)));
    return client.outcome(call);
  }
  // Answers the next request to a worker honestly.
  void serve(uint32_t worker) { puppets[worker].send(echo(puppets[worker].take())); }
  // Waits for the end, while a worker answers whatever it is asked, and returns it.
  Status finish_by(uint32_t worker, const CallPtr& call) {
    const Deadline deadline = Deadline::after_ms(kPatienceMs);
    while (!client.wait(call, Deadline::after_ms(1)) && !deadline.has_passed()) {
      if (auto request = puppets[worker].try_take()) puppets[worker].send(echo(*request));
    }
    return finish(call);
  }
  // Makes a call that asks this worker once, and returns how it ended.
  Status call(Tokens& tokens, uint32_t worker) {
    const CallPtr submitted = submit(tokens);
    serve(worker);
    return finish(submitted);
  }
  // A call on worker `worker` alone, answered honestly: proves that worker and slots still work.
  bool works(uint32_t worker) {
    Tokens tokens{{static_cast<int32_t>(worker * kExpertsEach)}};
    return call(tokens, worker).ok() && tokens.is_right();
  }
  Counters counters(uint32_t worker) const {
    for (const CountersOf& one : client.counters()) {
      if (one.worker == worker) return one.counters;
    }
    return {};
  }
  // Gives a worker another path; its puppet has the other end, unless that fails.
  Status renew(uint32_t worker, transport::SlotGeometry geometry = {3, 4096, 4096}) {
    auto pair = transport::make_loopback(geometry).value();
    Status renewed = client.renew_path(worker, {std::move(pair.host), kGeneration + 1});
    if (renewed.ok()) puppets[worker].channel = std::move(pair.worker);
    return renewed;
  }
  // Gives a lost worker a fresh path and new pulses, as after a restart; `former`, if given, gets
  // the worker's end of the lost path.
  Status replace(uint32_t worker, uint64_t generation = kGeneration + 1,
                 std::unique_ptr<transport::Channel>* former = nullptr) {
    auto pair = transport::make_loopback({3, 4096, 4096}).value();
    auto [host_pulse, pulse] = pulse_ends();
    Status replaced =
        client.replace_worker(worker, {std::move(pair.host), generation}, std::move(host_pulse));
    if (!replaced.ok()) return replaced;
    if (former != nullptr) *former = std::move(puppets[worker].channel);
    puppets[worker].channel = std::move(pair.worker);
    puppets[worker].pulse = std::move(pulse);
    return replaced;
  }

  ExpertClient client;
  std::vector<Puppet> puppets;

 private:
  static std::pair<OwnedFd, OwnedFd> pulse_ends() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    return {OwnedFd(ends[0]), OwnedFd(ends[1])};
  }
  void add_worker(uint32_t index, const SceneOptions& options) {
    auto pair = transport::make_loopback(options.geometry).value();
    NewWorker worker;
    worker.name = std::string("w").append(std::to_string(index));
    worker.path = {std::move(pair.host), kGeneration};
    worker.policy = options.policy;
    worker.is_last_resort = options.last_resort == index;
    Puppet puppet;
    puppet.channel = std::move(pair.worker);
    if (options.has_pulses) {
      std::tie(worker.pulse, puppet.pulse) = pulse_ends();
    }
    REQUIRE(client.add_worker(std::move(worker)).value() == index);
    puppets.push_back(std::move(puppet));
  }
};

}  // namespace dflash::client

// Workers that answer by rule, seen by a client of the processor and by a simulated device of the
// host: each scene has the same two workers twice, one pair per path, and keeps every request that
// came.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "base/dtype.h"
#include "cards/device_exchange/gpu_steps.h"
#include "cards/device_exchange/sim/exchange_module.h"
#include "cards/sim/sim_runtime.h"
#include "client/expert_client.h"
#include "transport/loopback/loopback.h"
#include "transport/ring/ring_bell.h"
#include "wire/payload.h"

namespace dflash::device_exchange {

using compute::gpu::GpuHost;
using compute::gpu::SimulatedVendor;

inline constexpr uint32_t kIn = 40, kOut = 24, kExperts = 7, kLayer = 3;
inline constexpr uint64_t kGeneration = 11;
using Bytes = std::vector<std::byte>;

struct Dtypes {
  Dtype model = Dtype::kF32, request = Dtype::kF32, reply = Dtype::kF32;
};

inline wire::FrameHeader header_of(const Bytes& message) {
  return wire::decode_frame_header(
             std::span<const std::byte>(message).first<wire::kFrameHeaderBytes>())
      .value();
}
inline void set_header(Bytes& message, const wire::FrameHeader& header) {
  wire::encode_frame_header(header, std::span<std::byte>(message).first<wire::kFrameHeaderBytes>());
}

// The reply to a request: rows that follow from its checksum.
inline Bytes honest_answer(const Bytes& request) {
  wire::FrameHeader header = header_of(request);
  REQUIRE(checksum(std::span(request).subspan(wire::kFrameHeaderBytes)) == header.payload_checksum);
  std::mt19937 random(header.payload_checksum);
  std::vector<float> rows(size_t{header.num_rows} * kOut);
  for (float& value : rows)
    value = static_cast<float>(static_cast<int32_t>(random()) % 1000) / 333.0f;
  Bytes answer(
      wire::kFrameHeaderBytes +
      wire::ReplyLayout::of(header.num_rows, kOut, header.reply_dtype).value().payload_bytes);
  REQUIRE(convert(Dtype::kF32, reinterpret_cast<const std::byte*>(rows.data()), header.reply_dtype,
                  answer.data() + wire::kFrameHeaderBytes + wire::kReplyTimingBytes, rows.size()));
  header.kind = wire::FrameKind::kReply;
  header.payload_bytes = static_cast<uint32_t>(answer.size() - wire::kFrameHeaderBytes);
  header.payload_checksum = checksum(std::span(answer).subspan(wire::kFrameHeaderBytes));
  set_header(answer, header);
  return answer;
}

// One worker: a thread that answers until it is told to stop. An empty answer: silence.
class RuleWorker {
 public:
  using Rule = std::function<Bytes(const Bytes& request)>;
  RuleWorker(std::unique_ptr<transport::Channel> channel, Rule rule)
      : channel_(std::move(channel)), rule_(std::move(rule)), thread_([this] { serve(); }) {}
  ~RuleWorker() { stop(); }
  void stop() {
    is_over_ = true;
    if (thread_.joinable()) thread_.join();
    channel_.reset();
  }
  std::vector<Bytes> requests;  // once stopped
  std::atomic<uint32_t> num_requests{0};

 private:
  void serve() {
    while (!is_over_) {
      transport::WaitEntry entry{channel_.get(), std::nullopt, std::nullopt};
      transport::wait_any({&entry, 1}, Deadline::after_ms(5), 0);
      if (entry.error) return;
      if (!entry.arrival) continue;
      requests.emplace_back(entry.arrival->bytes.begin(), entry.arrival->bytes.end());
      ++num_requests;
      const Bytes answer = rule_(requests.back());
      if (answer.empty()) continue;
      std::copy(answer.begin(), answer.end(), channel_->outgoing(entry.arrival->slot).begin());
      static_cast<void>(channel_->publish(entry.arrival->slot, answer.size()));
    }
  }

  std::unique_ptr<transport::Channel> channel_;
  Rule rule_;
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

// A client and its two workers; shard 0: experts 0, 2, 5 at worker 1; shard 4: the others at worker
// 0.
class StepScene {
 public:
  explicit StepScene(Dtypes dtypes, RuleWorker::Rule rule = honest_answer) : dtypes_(dtypes) {
    client::LayerPlan plan{
        kLayer, "layer", kIn, kOut, kExperts, {{0, 1, 900, {0, 2, 5}}, {4, 0, 904, {1, 3, 4, 6}}}
    };
    for (uint32_t index = 0; index < 2; ++index) {
      auto pair = transport::make_loopback({3, 64 * 1024, 32 * 1024}).value();
      client::NewWorker worker;
      worker.name = std::string("w").append(std::to_string(index));
      worker.path = {std::move(pair.host), kGeneration};
      worker.policy = {1024, 2};
      worker.request_dtype = dtypes.request;
      worker.reply_dtype = dtypes.reply;
      REQUIRE(client.add_worker(std::move(worker)).ok());
      workers.push_back(std::make_unique<RuleWorker>(std::move(pair.worker), rule));
    }
    REQUIRE(client.define_layer(plan).ok());
  }
  const Dtypes& dtypes() const { return dtypes_; }
  std::vector<std::vector<Bytes>> stop() {
    std::vector<std::vector<Bytes>> requests;
    for (auto& worker : workers) {
      worker->stop();
      requests.push_back(std::move(worker->requests));
    }
    return requests;
  }

  client::ExpertClient client{client::ClientOptions(30'000'000'000, 2'000'000'000)};
  std::vector<std::unique_ptr<RuleWorker>> workers;

 private:
  Dtypes dtypes_;
};

// The tensors of a call; the second half of the expert range is rarer, the id past the end is the
// sentinel.
struct CallTensors {
  CallTensors(uint32_t tokens, uint32_t pairs, Dtype model, uint32_t seed,
              uint32_t most_expert = kExperts + 1)
      : num_tokens(tokens),
        top_k(pairs),
        dtype(model),
        ids(tokens * pairs),
        weights(tokens * pairs),
        output(tokens * kOut * dtype_bytes(model)) {
    std::mt19937 random(seed);
    std::vector<float> values(tokens * kIn);
    for (float& value : values) value = static_cast<float>(static_cast<int32_t>(random())) / 1e9f;
    values[0] = -0.0f;
    hidden.resize(values.size() * dtype_bytes(model));
    REQUIRE(convert(Dtype::kF32, reinterpret_cast<const std::byte*>(values.data()), model,
                    hidden.data(), values.size()));
    for (int64_t& id : ids) id = random() % most_expert;
    for (float& weight : weights) weight = static_cast<float>(random() % 100) / 64.0f;
  }
  TokenBatch batch() {
    TokenBatch b;
    b.hidden_states = hidden.data();
    b.row_stride_bytes = static_cast<int64_t>(kIn * dtype_bytes(dtype));
    b.dtype = dtype;
    b.num_tokens = num_tokens;
    b.top_k = top_k;
    b.topk_ids = ids.data();
    b.ids_are_64bit = true;
    b.topk_weights = reinterpret_cast<const std::byte*>(weights.data());
    b.output = output.data();
    return b;
  }
  StepCall step_call() {
    return {kLayer,     hidden.data(), kIn * dtype_bytes(dtype), dtype,       num_tokens,   top_k,
            ids.data(), true,          weights.data(),           Dtype::kF32, output.data()};
  }

  uint32_t num_tokens, top_k;
  Dtype dtype;
  Bytes hidden;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  Bytes output;
};

// A simulated device of the host with the scene's layer, and a step on the scene's workers.
class StepDevice {
 public:
  explicit StepDevice(SimulatedVendor vendor = SimulatedVendor::kCuda)
      : host(compute::gpu::make_simulated_runtime(
                 {.vendor = vendor, .memory_bytes = 1 << 26, .seed = 3, .has_foreign_memory = true},
                 exchange_module())
                 .value()),
        steps(host) {
    define({1, 0}, {0, 0});
  }
  // Says by which lane, and in which of its slots, the two shards are asked for.
  void define(const std::array<uint32_t, 2>& lanes, const std::array<uint32_t, 2>& slots) {
    const StepShard shards[] = {
        {900, 0, lanes[0], slots[0], 0},
        {904, 4, lanes[1], slots[1], 0}
    };
    const uint32_t experts[kExperts] = {0u,           1u << 16, 1u,          1u << 16 | 1,
                                        1u << 16 | 2, 2u,       1u << 16 | 3};
    REQUIRE(steps.define_layer({kLayer, kIn, kOut, shards, experts}).ok());
  }
  void begin(StepScene& scene, std::chrono::nanoseconds budget = std::chrono::seconds(60)) {
    auto lease = scene.client.begin_step(64);
    REQUIRE(lease.ok());
    std::vector<StepLane> mapped;
    std::vector<transport::RingView> rings;
    for (const client::LeasedPath& lane : lease.value().paths) {
      const transport::RingView& ring = lane.ring;
      rings.push_back(ring);
      mapped.push_back({reinterpret_cast<unsigned char*>(
                            steps.map_memory(ring.own, ring.own_bytes, false).value()),
                        reinterpret_cast<unsigned char*>(
                            steps.map_memory(ring.peer, ring.peer_bytes, true).value()),
                        lane.generation, ring.own_slots, ring.own_stride, ring.peer_slots,
                        ring.peer_stride, ring.entry_mask, ring.head, ring.tail, 0});
    }
    REQUIRE(steps
                .begin({mapped, 64 * 1024, 32 * 1024, lease.value().first_call,
                        scene.dtypes().request, scene.dtypes().reply, budget, std::nullopt})
                .ok());
    bell = std::make_unique<transport::RingBell>(rings, 20'000);
  }
  // Runs what was added; gives up after a minute.
  StepOutcome finish(StepScene& scene) {
    const Deadline deadline = Deadline::after_ms(60'000);
    for (bool is_done = false; !is_done && !deadline.has_passed();) {
      auto waited = steps.wait(std::chrono::milliseconds(2));
      REQUIRE_MESSAGE(waited.ok(), (waited.ok() ? "" : waited.error().message));
      is_done = waited.value();
      if (!is_done && !scene.client.judge_step().ok()) steps.abort();
    }
    auto ended = steps.end();
    REQUIRE(ended.ok());
    bell.reset();
    client::StepResult result;
    result.has_failed = ended.value().error != 0;
    for (const StepLane& lane : ended.value().lanes) result.used.push_back({lane.head, lane.tail});
    scene.client.end_step(result);
    return ended.value();
  }

  GpuHost host;
  GpuSteps steps;
  std::unique_ptr<transport::RingBell> bell;
};

}  // namespace dflash::device_exchange

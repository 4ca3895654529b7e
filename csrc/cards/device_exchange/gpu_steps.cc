// The host's side of device steps: the memory that a step's kernels share, the launches of a call,
// and what came of the step.
// SPDX-License-Identifier: Apache-2.0
#include "cards/device_exchange/gpu_steps.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "cards/device_exchange/exchange_kernels.h"
#include "wire/frame_layout.h"
#include "wire/payload_layout.h"

namespace dflash::device_exchange {
namespace {

using compute::gpu::DeviceRuntime;
using compute::gpu::GpuHost;
using compute::gpu::KernelLaunch;

constexpr uint64_t kAlignment = 256;      // of each part of the device's memory
constexpr uint32_t kMostMessages = 4096;  // of a step: calls times shards

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
Error argument_error(std::string text) {
  return Error{ErrorCode::kInvalidArgument, std::move(text)};
}

uint64_t request_bytes_of(uint32_t tokens, uint32_t top_k, uint32_t in_size, Dtype dtype) {
  return wire::kFrameHeaderBytes +
         wire::request_offsets(tokens, tokens * top_k, in_size, dtype).payload_bytes;
}
uint64_t reply_bytes_of(uint32_t tokens, uint32_t out_size, Dtype dtype) {
  return wire::kFrameHeaderBytes + wire::reply_offsets(tokens, out_size, dtype).payload_bytes;
}
constexpr uint64_t kMostErrorMessageBytes = wire::kFrameHeaderBytes + wire::kMaxErrorPayloadBytes;

}  // namespace

// Offsets in the device's memory. What comes before row_places is mirrored at the host.
struct GpuSteps::Places {
  explicit Places(const GpuSteps& steps)
      : lanes(aligned(sizeof(StepState))),
        messages(lanes + aligned(steps.num_lanes_ * sizeof(StepLane))),
        row_places(messages + aligned(kMostMessages * sizeof(StepMessage))),
        outgoing(row_places +
                 aligned(uint64_t{steps.most_shards_} * kMostStepTokens * sizeof(uint16_t))),
        incoming(outgoing + steps.most_shards_ * steps.outgoing_stride_),
        num_bytes(incoming + steps.most_shards_ * steps.incoming_stride_) {}
  uint64_t lanes, messages, row_places, outgoing, incoming, num_bytes;
  uint64_t abort() const { return row_places; }  // in the mirror, behind what is copied
  uint64_t mirror_bytes() const { return row_places + kAlignment; }
};

GpuSteps::~GpuSteps() {
  const GpuHost::Turn turn(host_);
  if (turn.is_hung()) return;  // what the device may still use stays
  for (const auto& [memory, device] : mapped_) turn.runtime().unmap_host(memory);
  for (const auto& [index, layer] : layers_) turn.runtime().release(layer.tables);
  turn.runtime().release(memory_);
  if (mirror_ != nullptr) turn.runtime().release_staging(mirror_);
}

Result<std::byte*> GpuSteps::map_memory(std::byte* memory, uint64_t num_bytes, bool is_read_only) {
  const GpuHost::Turn turn(host_);
  auto device = turn.runtime().map_host(memory, num_bytes, is_read_only);
  if (!device.ok()) return named(std::move(device).error());
  mapped_[memory] = device.value();
  return device;
}

void GpuSteps::unmap_memory(std::byte* memory) {
  const GpuHost::Turn turn(host_);
  if (mapped_.erase(memory) != 0 && !turn.is_hung()) turn.runtime().unmap_host(memory);
}

Status GpuSteps::define_layer(const StepLayerPlan& plan) {
  const GpuHost::Turn turn(host_);
  if (is_open_) return argument_error("a layer is defined within a step");
  if (plan.shards.empty() || plan.shards.size() >= kNoRow || plan.experts.empty())
    return argument_error("a layer without shards or experts");
  for (const uint32_t entry : plan.experts) {
    if (entry >> 16 >= plan.shards.size())
      return argument_error("an expert is in no shard of its layer");
  }
  const uint64_t shard_bytes = aligned(plan.shards.size_bytes());
  const auto known = layers_.find(plan.layer);
  std::byte* tables = nullptr;
  if (known != layers_.end() && known->second.shards.size() == plan.shards.size() &&
      known->second.num_experts == plan.experts.size()) {
    tables = known->second.tables;
  } else {
    auto allocated = turn.runtime().allocate(shard_bytes + plan.experts.size_bytes());
    if (!allocated.ok()) return named(std::move(allocated).error());
    if (known != layers_.end()) turn.runtime().release(known->second.tables);
    tables = allocated.value();
  }
  layers_[plan.layer] = {plan.in_size, plan.out_size, static_cast<uint32_t>(plan.experts.size()),
                         std::vector<StepShard>(plan.shards.begin(), plan.shards.end()), tables};
  most_shards_ = std::max(most_shards_, static_cast<uint32_t>(plan.shards.size()));
  DFLASH_TRY(turn.runtime().copy_in(tables, reinterpret_cast<const std::byte*>(plan.shards.data()),
                                    plan.shards.size_bytes()));
  DFLASH_TRY(turn.runtime().copy_in(tables + shard_bytes,
                                    reinterpret_cast<const std::byte*>(plan.experts.data()),
                                    plan.experts.size_bytes()));
  return turn.drain(std::chrono::seconds(30));
}

// Makes the memory at least as large as the step needs.
Status GpuSteps::reserve(const StepPlan& plan, const GpuHost::Turn& turn) {
  uint32_t in_size = 1, out_size = 1;
  for (const auto& [index, layer] : layers_) {
    in_size = std::max(in_size, layer.in_size);
    out_size = std::max(out_size, layer.out_size);
  }
  num_lanes_ = static_cast<uint32_t>(plan.lanes.size());
  outgoing_stride_ =
      aligned(std::min(plan.request_bytes, request_bytes_of(kMostStepTokens, kMostStepTopK, in_size,
                                                            plan.request_dtype)));
  const uint64_t reply = std::max<uint64_t>(
      reply_bytes_of(kMostStepTokens, out_size, plan.reply_dtype), kMostErrorMessageBytes);
  incoming_stride_ = std::min(plan.reply_bytes, aligned(reply));
  const Places places(*this);
  if (places.num_bytes > memory_bytes_) {
    turn.runtime().release(memory_);
    memory_ = nullptr;
    memory_bytes_ = 0;
    auto memory = turn.runtime().allocate(places.num_bytes);
    if (!memory.ok()) return named(std::move(memory).error());
    memory_ = memory.value();
    memory_bytes_ = places.num_bytes;
  }
  if (places.mirror_bytes() > mirror_bytes_) {
    if (mirror_ != nullptr) turn.runtime().release_staging(mirror_);
    mirror_ = nullptr;
    mirror_bytes_ = 0;
    auto mirror = turn.runtime().allocate_staging(places.mirror_bytes());
    if (!mirror.ok()) return named(std::move(mirror).error());
    mirror_ = mirror.value();
    mirror_bytes_ = places.mirror_bytes();
  }
  return ok();
}

Status GpuSteps::begin(const StepPlan& plan) {
  const GpuHost::Turn turn(host_);
  if (is_open_) return argument_error("a device step is already open");
  if (turn.is_hung()) return turn.drain({});  // which says so
  if (plan.lanes.empty() || plan.request_bytes % 64 != 0 || plan.reply_bytes % 64 != 0 ||
      plan.reply_bytes < kMostErrorMessageBytes) {
    return argument_error("a device step without workers, or with slots too small for an error");
  }
  DFLASH_TRY(reserve(plan, turn));
  const Places places(*this);
  std::memset(mirror_, 0, places.mirror_bytes());
  StepState state{};
  state.first_call = plan.first_call;
  state.budget_ns = static_cast<uint64_t>(plan.budget.count());
  std::memcpy(mirror_, &state, sizeof state);
  std::memcpy(mirror_ + places.lanes, plan.lanes.data(), plan.lanes.size_bytes());
  if (plan.stream) turn.runtime().borrow_queue(*plan.stream);
  plan_ = plan;
  plan_.lanes = {};
  calls_.clear();
  num_messages_ = 0;
  is_open_ = true;
  return turn.runtime().copy_in(memory_, mirror_, places.messages);
}

Status GpuSteps::check_call(const StepCall& call, const Layer& layer) const {
  const auto limit = [](const char* what, uint64_t found, uint64_t most) {
    return argument_error(std::string("a call of a device step has ") + what + " " +
                          std::to_string(found) + "; allowed are 1.." + std::to_string(most) +
                          "; larger ones go through experts() outside of the step");
  };
  if (call.num_tokens < 1 || call.num_tokens > kMostStepTokens)
    return limit("tokens", call.num_tokens, kMostStepTokens);
  if (call.top_k < 1 || call.top_k > kMostStepTopK)
    return limit("top_k", call.top_k, kMostStepTopK);
  const uint64_t request =
      request_bytes_of(call.num_tokens, call.top_k, layer.in_size, plan_.request_dtype);
  const uint64_t reply = reply_bytes_of(call.num_tokens, layer.out_size, plan_.reply_dtype);
  if (request > std::min(plan_.request_bytes, outgoing_stride_))
    return limit("bytes", request, plan_.request_bytes);
  if (reply > incoming_stride_) return limit("reply bytes", reply, incoming_stride_);
  if (calls_.size() == kMostStepCalls || num_messages_ + layer.shards.size() > kMostMessages)
    return limit("calls", calls_.size() + 1, calls_.size());
  return ok();
}

Status GpuSteps::add(const StepCall& call) {
  const GpuHost::Turn turn(host_);
  if (!is_open_) return argument_error("no device step is open");
  const auto found = layers_.find(call.layer);
  if (found == layers_.end())
    return argument_error("layer " + std::to_string(call.layer) +
                          " is not defined for device steps");
  const Layer& layer = found->second;
  DFLASH_TRY(check_call(call, layer));
  const Places places(*this);
  const auto at = [this](uint64_t offset) {
    return reinterpret_cast<unsigned char*>(memory_) + offset;
  };
  StepParams params{};
  params.state = reinterpret_cast<StepState*>(memory_);
  params.lanes = reinterpret_cast<StepLane*>(at(places.lanes));
  params.shards = reinterpret_cast<const StepShard*>(layer.tables);
  params.experts = reinterpret_cast<const uint32_t*>(
      layer.tables + aligned(layer.shards.size() * sizeof(StepShard)));
  params.messages = reinterpret_cast<StepMessage*>(at(places.messages)) + num_messages_;
  params.row_places = reinterpret_cast<uint16_t*>(at(places.row_places));
  params.outgoing = at(places.outgoing);
  params.incoming = at(places.incoming);
  params.abort = reinterpret_cast<const uint32_t*>(mirror_ + places.abort());
  params.hidden_states = call.hidden_states;
  params.topk_ids = call.topk_ids;
  params.topk_weights = call.topk_weights;
  params.output = call.output;
  params.row_stride_bytes = call.row_stride_bytes;
  params.outgoing_stride = outgoing_stride_;
  params.incoming_stride = incoming_stride_;
  params.num_tokens = call.num_tokens;
  params.top_k = call.top_k;
  params.num_experts = layer.num_experts;
  params.num_shards = static_cast<uint32_t>(layer.shards.size());
  params.in_size = layer.in_size;
  params.out_size = layer.out_size;
  params.layer = call.layer;
  params.call_index = static_cast<uint32_t>(calls_.size());
  params.ids_are_64bit = call.ids_are_64bit;
  params.dtype = call.dtype;
  params.weights_dtype = call.weights_dtype;
  params.request_dtype = plan_.request_dtype;
  params.reply_dtype = plan_.reply_dtype;
  calls_.push_back({call.layer, params.num_shards, num_messages_});
  num_messages_ += params.num_shards;
  return launch(params, layer, turn.runtime());
}

Status GpuSteps::launch(const StepParams& params, const Layer& layer, DeviceRuntime& runtime) {
  KernelLaunch one{.grid_x = num_lanes_,
                   .threads = kStepThreads,
                   .params = &params,
                   .params_bytes = sizeof params};
  one.kernel = kPackRequests;
  DFLASH_TRY(runtime.launch(one));
  one.kernel = kAwaitReplies;
  DFLASH_TRY(runtime.launch(one));
  one.kernel = kCombineReplies;
  one.grid_x = (params.num_tokens * layer.out_size + kStepThreads - 1) / kStepThreads;
  return runtime.launch(one);
}

Result<bool> GpuSteps::wait(std::chrono::nanoseconds at_most) {
  const GpuHost::Turn turn(host_);
  return turn.runtime().wait(at_most);
}

void GpuSteps::abort() {
  if (!is_open_) return;
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(mirror_ + Places(*this).abort()))
      .store(1, std::memory_order_release);
}

void GpuSteps::give_up() {
  const GpuHost::Turn turn(host_);
  turn.count_as_hung();
  is_open_ = false;
}

Result<StepOutcome> GpuSteps::end() {
  const GpuHost::Turn turn(host_);
  if (!is_open_) return argument_error("no device step is open");
  const uint64_t num_bytes = Places(*this).messages + num_messages_ * sizeof(StepMessage);
  Status copied = turn.runtime().copy_out(mirror_, memory_, num_bytes);
  if (copied.ok()) copied = turn.drain(std::chrono::seconds(30));
  is_open_ = false;
  turn.runtime().return_queue();
  if (!copied.ok()) return std::move(copied).error();
  return read_outcome();
}

StepOutcome GpuSteps::read_outcome() {
  const Places places(*this);
  StepOutcome outcome;
  StepState state{};
  std::memcpy(&state, mirror_, sizeof state);
  outcome.error = state.error;
  outcome.lanes.resize(num_lanes_);
  std::memcpy(outcome.lanes.data(), mirror_ + places.lanes, num_lanes_ * sizeof(StepLane));
  const auto* messages = reinterpret_cast<const StepMessage*>(mirror_ + places.messages);
  for (uint32_t index = 0; index < calls_.size(); ++index) {
    const Call& call = calls_[index];
    for (uint32_t place = 0; place < call.num_shards; ++place) {
      const StepShard& shard = layers_[call.layer].shards[place];
      outcome.records.push_back(
          {index, call.layer, shard.shard, shard.lane, messages[call.first_message + place]});
      if (index != step_error_call(state.error)) continue;
      outcome.layer = call.layer;
      if (place != step_error_place(state.error)) continue;
      outcome.lane = shard.lane;
      outcome.slot = shard.slot;
    }
  }
  return outcome;
}

}  // namespace dflash::device_exchange

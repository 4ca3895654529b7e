// Device steps: the host's device packs requests straight into the workers' slots, waits for their
// replies and combines them, three kernels a call, with no host in between. A step is a
// transaction: it has one deadline and one error word, which is read once at its end.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cards/device_exchange/step_params.h"
#include "cards/gpu_host.h"

namespace dflash::device_exchange {

// A layer as device steps know it.
struct StepLayerPlan {
  uint32_t layer = 0, in_size = 0, out_size = 0;
  std::span<const StepShard> shards;  // ascending ids
  std::span<const uint32_t> experts;  // [num_experts] as StepParams::experts
};

// One step.
struct StepPlan {
  std::span<const StepLane> lanes;              // addresses as map_memory gave them
  uint64_t request_bytes = 0, reply_bytes = 0;  // the smallest slot of any lane
  uint64_t first_call = 0;
  Dtype request_dtype = Dtype::kF32, reply_dtype = Dtype::kF32;
  std::chrono::nanoseconds budget{};  // after it, the device gives up by itself
  // A stream of the caller's framework, on which the step then works in order with it; none: the
  // device's own.
  std::optional<uint64_t> stream;
};

// One call of a step: its tensors, as device addresses.
struct StepCall {
  uint32_t layer = 0;
  const void* hidden_states = nullptr;
  uint64_t row_stride_bytes = 0;
  Dtype dtype = Dtype::kF32;
  uint32_t num_tokens = 0, top_k = 0;
  const void* topk_ids = nullptr;
  bool ids_are_64bit = false;
  const void* topk_weights = nullptr;
  Dtype weights_dtype = Dtype::kF32;
  void* output = nullptr;
};

// What travelled for one shard in one call. num_rows 0: nothing.
struct StepRecord {
  uint32_t call_index, layer, shard, lane;
  StepMessage message;
};

// How a step went.
struct StepOutcome {
  uint64_t error = 0;  // StepState::error
  // Where the step failed: the layer of the error's call, the lane and slot of its shard. Lane ~0:
  // at no worker.
  uint32_t layer = 0, lane = ~0u, slot = 0;
  std::vector<StepLane> lanes;
  std::vector<StepRecord> records;
};

class GpuSteps {
 public:
  // `host` was opened with kExchangeKernels and outlives this.
  explicit GpuSteps(compute::gpu::GpuHost& host) : host_(host) {}
  ~GpuSteps();
  GpuSteps(const GpuSteps&) = delete;
  GpuSteps& operator=(const GpuSteps&) = delete;

  // Lets the device use [memory, memory + num_bytes) of the host, whole pages; returns the device's
  // address. Errors: kUnsupported where the driver refuses.
  Result<std::byte*> map_memory(std::byte* memory, uint64_t num_bytes, bool is_read_only);
  void unmap_memory(std::byte* memory);

  // A layer may be defined again, not within a step: who answers for its shards may have changed.
  // Errors: kInvalidArgument, kOutOfMemory.
  Status define_layer(const StepLayerPlan& plan);
  // Errors: kInvalidArgument, kOutOfMemory; the device's.
  Status begin(const StepPlan& plan);
  // Queues a call; the result is in `output` once the queue came that far, unless the step failed.
  // Errors: kInvalidArgument naming what does not fit a step; the device's.
  Status add(const StepCall& call);
  // True once everything queued is done, false if that takes longer than `at_most`.
  Result<bool> wait(std::chrono::nanoseconds at_most);
  // Ends the step's waits with kClosed. Any thread may call it, also while another one waits.
  void abort();
  // Says how the step went, once all of it is done. The step is over, whatever this returns.
  Result<StepOutcome> end();
  // Gives up a step whose work does not end: the device counts as hung.
  void give_up();

 private:
  struct Layer {
    uint32_t in_size, out_size, num_experts;
    std::vector<StepShard> shards;
    std::byte* tables;  // shards, then experts
  };
  struct Call {
    uint32_t layer, num_shards, first_message;
  };
  struct Places;
  Status reserve(const StepPlan& plan, const compute::gpu::GpuHost::Turn& turn);
  Status check_call(const StepCall& call, const Layer& layer) const;
  Status launch(const StepParams& params, const Layer& layer, compute::gpu::DeviceRuntime& runtime);
  StepOutcome read_outcome();
  Error named(Error error) const { return std::move(error).with(host_.name()); }

  compute::gpu::GpuHost& host_;
  std::map<uint32_t, Layer> layers_;
  std::map<std::byte*, std::byte*> mapped_;  // host's address -> device's
  // Device memory: state, lanes, messages, row places, then the messages' bytes out and in.
  std::byte* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  // Pinned memory: what is copied in at the begin and back at the end, then the word that aborts.
  std::byte* mirror_ = nullptr;
  uint64_t mirror_bytes_ = 0;
  StepPlan plan_{};
  uint32_t num_lanes_ = 0, most_shards_ = 1;
  uint64_t outgoing_stride_ = 0, incoming_stride_ = 0;
  std::vector<Call> calls_;
  uint32_t num_messages_ = 0;
  bool is_open_ = false;
};

}  // namespace dflash::device_exchange

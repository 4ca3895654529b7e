// The host's table (host_abi.h) of a plug-in: `host_table_of<Driver>()`. A Driver has, beside what
// device_table.h asks for,
//
//   static constexpr int32_t kDlpackType;
//   // With the kernels of kExchangeKernels.
//   static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open_for_host(uint32_t device,
//   const OpenOptions& options);
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cards/device_exchange/gpu_steps.h"
#include "plugin/abi_records.h"
#include "plugin/device.h"
#include "plugin/device_table.h"
#include "plugin/host_abi.h"

struct dflash_host {
  dflash_host(std::unique_ptr<dflash::compute::gpu::DeviceRuntime> runtime, int32_t type)
      : device(std::move(runtime)), dlpack_type(type) {}
  dflash::compute::gpu::GpuHost device;
  dflash::device_exchange::GpuSteps steps{device};
  const int32_t dlpack_type;
};

namespace dflash::plugin {
namespace host_internal {

inline int32_t info(dflash_host* host, dflash_host_info* found, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (host == nullptr) return missing("host table: host");
    auto record = new_record<dflash_host_info>();
    record.dlpack_type = host->dlpack_type;
    record.dlpack_id = host->dlpack_type == DFLASH_DLPACK_CPU
                           ? 0
                           : static_cast<int32_t>(host->device.facts().index);
    record.stream = host->device.stream();
    set_text(record.name, host->device.name());
    write_record(found, record);
    return ok();
  });
}

inline int32_t allocate_pinned(dflash_host* host, uint64_t num_bytes, void** memory,
                               dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (host == nullptr || memory == nullptr) return missing("host table: host or memory");
    auto allocated = host->device.allocate_pinned(num_bytes);
    if (!allocated.ok()) return std::move(allocated).error();
    *memory = allocated.value();
    return ok();
  });
}

template <bool kIsIn>
int32_t copy(dflash_host* host, const dflash_transfer* pieces, uint32_t num_pieces,
             int64_t timeout_ns, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (host == nullptr || (pieces == nullptr && num_pieces > 0))
      return missing("host table: host or pieces");
    std::vector<compute::gpu::HostTransfer> transfers;
    for (uint32_t i = 0; i < num_pieces; ++i) {
      transfers.push_back({static_cast<std::byte*>(pieces[i].device),
                           static_cast<std::byte*>(pieces[i].host), pieces[i].num_bytes});
    }
    const std::chrono::nanoseconds at_most(timeout_ns);
    return kIsIn ? host->device.copy_in(transfers, at_most)
                 : host->device.copy_out(transfers, at_most);
  });
}

inline int32_t map_memory(dflash_host* host, void* memory, uint64_t num_bytes,
                          uint32_t is_read_only, void** device, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (host == nullptr || memory == nullptr || device == nullptr)
      return missing("host table: host, memory or device");
    auto mapped =
        host->steps.map_memory(static_cast<std::byte*>(memory), num_bytes, is_read_only != 0);
    if (!mapped.ok()) return std::move(mapped).error();
    *device = mapped.value();
    return ok();
  });
}

// Enumerations as they come through the table.
inline Result<Dtype> dtype_of(uint32_t value) {
  if (value < kNumDtypes) return static_cast<Dtype>(value);
  return Error{ErrorCode::kInvalidArgument,
               "host table: dtype " + std::to_string(value) + " is unknown"};
}

static_assert(sizeof(dflash_step_shard) == sizeof(device_exchange::StepShard) &&
              sizeof(dflash_step_lane) == sizeof(device_exchange::StepLane));

inline int32_t step_layer(dflash_host* host, const dflash_step_layer* given, dflash_error* error) {
  return answered(error, [&]() -> Status {
    const dflash_step_layer layer = read_record(given);
    if (host == nullptr || layer.shards == nullptr || layer.experts == nullptr)
      return missing("host table: host, shards or experts");
    std::vector<device_exchange::StepShard> shards;
    for (uint32_t i = 0; i < layer.num_shards; ++i) {
      const dflash_step_shard& shard = layer.shards[i];
      shards.push_back({shard.weights_fingerprint, shard.shard, shard.lane, shard.slot, 0});
    }
    return host->steps.define_layer({
        layer.layer, layer.in_size, layer.out_size, shards, {layer.experts, layer.num_experts}
    });
  });
}

inline int32_t step_begin(dflash_host* host, const dflash_step* given, dflash_error* error) {
  return answered(error, [&]() -> Status {
    const dflash_step step = read_record(given);
    if (host == nullptr || step.lanes == nullptr) return missing("host table: host or lanes");
    std::vector<device_exchange::StepLane> lanes;
    for (uint32_t i = 0; i < step.num_lanes; ++i) {
      const dflash_step_lane& lane = step.lanes[i];
      lanes.push_back({static_cast<unsigned char*>(lane.requests),
                       static_cast<const unsigned char*>(lane.replies), lane.generation,
                       lane.request_slots, lane.request_stride, lane.reply_slots, lane.reply_stride,
                       lane.entry_mask, lane.head, lane.tail, 0});
    }
    auto request = dtype_of(step.request_dtype), reply = dtype_of(step.reply_dtype);
    if (!request.ok()) return std::move(request).error();
    if (!reply.ok()) return std::move(reply).error();
    device_exchange::StepPlan plan{lanes,
                                   step.request_bytes,
                                   step.reply_bytes,
                                   step.first_call,
                                   request.value(),
                                   reply.value(),
                                   std::chrono::nanoseconds(step.budget_ns),
                                   std::nullopt};
    if (step.has_stream != 0) plan.stream = step.stream;
    return host->steps.begin(plan);
  });
}

inline int32_t step_add(dflash_host* host, const dflash_step_call* given, dflash_error* error) {
  return answered(error, [&]() -> Status {
    const dflash_step_call call = read_record(given);
    if (host == nullptr || call.hidden_states == nullptr || call.output == nullptr)
      return missing("host table: host or a tensor");
    auto dtype = dtype_of(call.dtype), weights = dtype_of(call.weights_dtype);
    if (!dtype.ok()) return std::move(dtype).error();
    if (!weights.ok()) return std::move(weights).error();
    return host->steps.add({call.layer, call.hidden_states, call.row_stride_bytes, dtype.value(),
                            call.num_tokens, call.top_k, call.topk_ids, call.ids_are_64bit != 0,
                            call.topk_weights, weights.value(), call.output});
  });
}

inline int32_t step_wait(dflash_host* host, int64_t timeout_ns, uint32_t* is_done,
                         dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (host == nullptr || is_done == nullptr) return missing("host table: host or is_done");
    auto waited = host->steps.wait(std::chrono::nanoseconds(timeout_ns));
    if (!waited.ok()) return std::move(waited).error();
    *is_done = waited.value() ? 1 : 0;
    return ok();
  });
}

inline void fill_messages(const device_exchange::StepOutcome& ended, dflash_step_outcome& outcome) {
  outcome.num_messages = 0;
  for (const device_exchange::StepRecord& record : ended.records) {
    if (record.message.num_rows == 0 || outcome.num_messages == outcome.max_messages) continue;
    outcome.messages[outcome.num_messages++] = {record.call_index,
                                                record.layer,
                                                record.lane,
                                                record.message.num_rows,
                                                record.message.num_pairs,
                                                0,
                                                record.message.request_bytes,
                                                record.message.reply_bytes};
  }
}

inline int32_t step_end(dflash_host* host, dflash_step_outcome* given, dflash_error* error) {
  return answered(error, [&]() -> Status {
    dflash_step_outcome outcome = read_record(given);
    if (host == nullptr || outcome.lanes == nullptr ||
        (outcome.messages == nullptr && outcome.max_messages > 0))
      return missing("host table: host or lanes");
    auto ended = host->steps.end();
    if (!ended.ok()) return std::move(ended).error();
    for (size_t i = 0; i < ended.value().lanes.size(); ++i) {
      outcome.lanes[i].head = ended.value().lanes[i].head;
      outcome.lanes[i].tail = ended.value().lanes[i].tail;
    }
    fill_messages(ended.value(), outcome);
    outcome.code = static_cast<int32_t>(device_exchange::step_error_code(ended.value().error));
    outcome.detail = device_exchange::step_error_detail(ended.value().error);
    outcome.layer = ended.value().layer;
    outcome.lane = ended.value().lane;
    outcome.slot = ended.value().slot;
    write_record(given, outcome);
    return ok();
  });
}

}  // namespace host_internal

template <class Driver>
const dflash_host_table* host_table_of() {
  static const dflash_host_table table = [] {
    dflash_host_table filled{};
    filled.struct_size = sizeof filled;
    filled.abi_version = DFLASH_HOST_ABI_VERSION;
    filled.name = Driver::kName;
    filled.version = internal::common_table().version;
    filled.open = [](uint32_t device, const dflash_open_options* options, dflash_host** opened,
                     dflash_error* error) {
      return answered(error, [&]() -> Status {
        if (opened == nullptr) return missing("host table: host");
        const dflash_open_options asked = read_record(options);
        auto runtime = Driver::open_for_host(device, OpenOptions{1, asked.seed});
        if (!runtime.ok()) return std::move(runtime).error();
        *opened = new dflash_host(std::move(runtime).value(), Driver::kDlpackType);
        return ok();
      });
    };
    filled.close = [](dflash_host* host) { delete host; };
    filled.info = &host_internal::info;
    filled.allocate_pinned = &host_internal::allocate_pinned;
    filled.release_pinned = [](dflash_host* host, void* memory) {
      if (host != nullptr) host->device.release_pinned(static_cast<std::byte*>(memory));
    };
    filled.copy_in = &host_internal::copy<true>;
    filled.copy_out = &host_internal::copy<false>;
    filled.map_memory = &host_internal::map_memory;
    filled.unmap_memory = [](dflash_host* host, void* memory) {
      if (host != nullptr) host->steps.unmap_memory(static_cast<std::byte*>(memory));
    };
    filled.step_layer = &host_internal::step_layer;
    filled.step_begin = &host_internal::step_begin;
    filled.step_add = &host_internal::step_add;
    filled.step_wait = &host_internal::step_wait;
    filled.step_abort = [](dflash_host* host) {
      if (host != nullptr) host->steps.abort();
    };
    filled.step_end = &host_internal::step_end;
    filled.step_give_up = [](dflash_host* host) {
      if (host != nullptr) host->steps.give_up();
    };
    return filled;
  }();
  return &table;
}

}  // namespace dflash::plugin

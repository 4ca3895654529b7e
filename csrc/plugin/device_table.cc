// The functions behind the C table. The queue of a device is a ring of batches that wait() computes
// in order on the caller's thread: no thread of its own, so that the caller's progress hook runs
// inside the computation.
// SPDX-License-Identifier: Apache-2.0
#include "plugin/device_table.h"

#include <optional>
#include <set>
#include <string>
#include <utility>

#include "compute/experts/layer_checks.h"
#include "plugin/abi_records.h"
#include "plugin/self_test.h"

using dflash::plugin::Device;
using dflash::plugin::DeviceListing;

namespace {

// More than any channel has slots, which bound what a worker has under way.
constexpr uint64_t kQueuedBatches = 64;

struct QueuedBatch {
  enum class State : uint8_t { kFree, kQueued, kDone };
  State state = State::kFree;
  dflash::compute::ExpertLayer* layer = nullptr;
  dflash::compute::ForwardArgs args;
  std::optional<dflash::Error> failure;
};

}  // namespace

struct dflash_device {
  std::unique_ptr<Device> device;
  std::set<std::pair<dflash::compute::NumericsClass, dflash::compute::WeightFormat>> proven;
  uint64_t next_ticket = 0;  // to be given
  uint64_t next_batch = 0;   // to be computed
  QueuedBatch queue[kQueuedBatches];
};

struct dflash_layer {
  dflash_device* owner = nullptr;
  std::unique_ptr<dflash::compute::ExpertLayer> experts;
};

namespace dflash::plugin {
namespace {

// Hands progress on to the other side of the table, where it is counted and may move bytes of a
// data path. It runs on the calling thread, as a body of YieldTo.
class ProgressRelay {
 public:
  explicit ProgressRelay(const dflash_progress* progress) : progress_(progress) {}
  compute::YieldingProgress counter;

  void operator()() {
    const uint64_t now = counter.load();
    if (progress_ != nullptr && progress_->advance != nullptr)
      progress_->advance(progress_->context, now - told_);
    told_ = now;
  }

 private:
  const dflash_progress* progress_;
  uint64_t told_ = 0;
};

int32_t answer_caps(dflash_device* device, dflash_caps* caps, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (device == nullptr) return missing("backend table: device");
    auto record = new_record<dflash_caps>();
    for (uint32_t format = 0; format < compute::kNumWeightFormats && format < 32; ++format) {
      if (device->device->takes(static_cast<compute::WeightFormat>(format)))
        record.formats |= 1u << format;
    }
    for (const compute::NumericsFacts& facts : compute::numerics_table()) {
      if (device->device->computes(facts.numerics))
        record.numerics |= 1u << static_cast<uint32_t>(facts.numerics);
    }
    record.dtypes = (1u << kNumDtypes) - 1;
    record.max_rows = device->device->max_rows();
    auto free_bytes = device->device->free_bytes();
    if (!free_bytes.ok()) return std::move(free_bytes).error();
    record.free_bytes = free_bytes.value();
    write_record(caps, record);
    return ok();
  });
}

Status check_layer(const Device& device, const LayerOptions& options) {
  for (compute::WeightFormat format : {options.formats.gate_up, options.formats.down}) {
    if (device.takes(format)) continue;
    return Error{ErrorCode::kUnsupported, std::string("weights in ") +
                                              compute::format_name(format) +
                                              " have no kernel on this device"};
  }
  if (!device.computes(options.numerics)) {
    return Error{ErrorCode::kUnsupported, std::string("numerics class ") +
                                              compute::numerics_name(options.numerics) +
                                              " is not computed by this device"};
  }
  DFLASH_TRY(compute::check_numerics(options.numerics, options.formats));
  if (options.num_local_experts >= 1 && options.num_local_experts <= 65535) return ok();
  return Error{ErrorCode::kUnsupported, "a layer has " + std::to_string(options.num_local_experts) +
                                            " local experts; supported: 1..65535"};
}

int32_t answer_layer_bytes(dflash_device* device, const dflash_ffn_spec* spec,
                           const dflash_layer_options* options, uint64_t* bytes,
                           dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (device == nullptr || bytes == nullptr) return missing("backend table: device or bytes");
    auto asked = spec_of(read_record(spec));
    if (!asked.ok()) return std::move(asked).error();
    auto layer = layer_options_of(read_record(options));
    if (!layer.ok()) return std::move(layer).error();
    DFLASH_TRY(check_layer(*device->device, layer.value()));
    *bytes = device->device->layer_bytes(asked.value(), layer.value().num_local_experts,
                                         layer.value().formats);
    return ok();
  });
}

// Runs the self-test, once per class and format of an open device.
Status prove_once(dflash_device& device, const LayerOptions& options) {
  if (!device.device->must_prove()) return ok();
  for (compute::WeightFormat format : {options.formats.gate_up, options.formats.down}) {
    if (device.proven.contains({options.numerics, format})) continue;
    DFLASH_TRY(prove_kernels(*device.device, options.numerics, format));
    device.proven.insert({options.numerics, format});
  }
  return ok();
}

int32_t answer_layer_define(dflash_device* device, const dflash_ffn_spec* spec,
                            const dflash_layer_options* options, dflash_layer** defined,
                            dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (device == nullptr || defined == nullptr) return missing("backend table: device or layer");
    auto asked = spec_of(read_record(spec));
    if (!asked.ok()) return std::move(asked).error();
    auto layer = layer_options_of(read_record(options));
    if (!layer.ok()) return std::move(layer).error();
    DFLASH_TRY(check_layer(*device->device, layer.value()));
    DFLASH_TRY(prove_once(*device, layer.value()));
    auto experts =
        device->device->backend().create_layer(asked.value(), layer.value().num_local_experts,
                                               layer.value().formats, layer.value().numerics);
    if (!experts.ok()) return std::move(experts).error();
    *defined = new dflash_layer{device, std::move(experts).value()};
    return ok();
  });
}

int32_t answer_expert_load(dflash_layer* layer, const dflash_expert* expert,
                           const dflash_progress* progress, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (layer == nullptr) return missing("backend table: layer");
    const dflash_expert record = read_record(expert);
    auto weights = weights_of(record);
    if (!weights.ok()) return std::move(weights).error();
    ProgressRelay relay(progress);
    const compute::YieldingProgress::YieldTo yielding(relay.counter, relay);
    return layer->experts->load_expert(record.local_expert_id, weights.value(), relay.counter);
  });
}

int32_t answer_expert_checksum(const dflash_layer* layer, uint32_t local_expert_id,
                               uint64_t* checksum) {
  if (layer == nullptr || checksum == nullptr ||
      local_expert_id >= layer->experts->num_local_experts())
    return 0;
  const std::optional<uint64_t> found = layer->experts->content_checksum(local_expert_id);
  if (!found) return 0;
  *checksum = *found;
  return 1;
}

int32_t answer_submit(dflash_layer* layer, const dflash_batch* batch, uint64_t* ticket,
                      dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (layer == nullptr || batch == nullptr || ticket == nullptr)
      return missing("backend table: layer, batch or ticket");
    auto args = batch_of(read_record(batch));
    if (!args.ok()) return std::move(args).error();
    DFLASH_TRY(compute::check_batch(args.value(), layer->experts->num_local_experts()));
    dflash_device& device = *layer->owner;
    QueuedBatch& queued = device.queue[device.next_ticket % kQueuedBatches];
    if (queued.state != QueuedBatch::State::kFree) {
      return Error{ErrorCode::kInvalidArgument,
                   std::to_string(kQueuedBatches) + " batches are under way; wait for the oldest"};
    }
    queued.state = QueuedBatch::State::kQueued;
    queued.layer = layer->experts.get();
    queued.args = args.value();
    *ticket = device.next_ticket++;
    return ok();
  });
}

// Computes everything queued up to and with `ticket`, in order.
void compute_until(dflash_device& device, uint64_t ticket, const dflash_progress* progress) {
  for (; device.next_batch <= ticket; ++device.next_batch) {
    QueuedBatch& batch = device.queue[device.next_batch % kQueuedBatches];
    ProgressRelay relay(progress);
    const compute::YieldingProgress::YieldTo yielding(relay.counter, relay);
    Status done = batch.layer->forward(batch.args, relay.counter);
    batch.state = QueuedBatch::State::kDone;
    if (!done.ok()) batch.failure = std::move(done).error();
  }
}

int32_t answer_wait(dflash_device* device, uint64_t ticket, int64_t timeout_ns,
                    const dflash_progress* progress, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (device == nullptr) return missing("backend table: device");
    QueuedBatch& batch = device->queue[ticket % kQueuedBatches];
    const bool is_known =
        ticket < device->next_ticket && device->next_ticket - ticket <= kQueuedBatches;
    if (!is_known || batch.state == QueuedBatch::State::kFree) {
      return Error{ErrorCode::kInvalidArgument,
                   "ticket " + std::to_string(ticket) + " is not under way"};
    }
    if (timeout_ns <= 0 && batch.state == QueuedBatch::State::kQueued) {
      return Error{ErrorCode::kTimeout, "no time was left for the batch; it is still queued"};
    }
    compute_until(*device, ticket, progress);
    batch.state = QueuedBatch::State::kFree;
    if (!batch.failure) return ok();
    return *std::exchange(batch.failure, std::nullopt);
  });
}

int32_t answer_selftest(dflash_device* device, uint32_t test_case, dflash_selftest* result,
                        dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (device == nullptr) return missing("backend table: device");
    auto tested = run_self_test(*device->device, test_case);
    if (!tested.ok()) return std::move(tested).error();
    auto record = new_record<dflash_selftest>();
    record.num_cases = tested.value().num_cases;
    record.elements = tested.value().elements;
    record.differing = tested.value().differing;
    set_text(record.kernel, tested.value().kernel);
    set_text(record.formats, tested.value().formats);
    write_record(result, record);
    return ok();
  });
}

}  // namespace

void internal::answer_probe(const Result<std::vector<DeviceListing>>& listed, dflash_probe* found) {
  auto record = new_record<dflash_probe>();
  if (listed.ok()) {
    record.num_devices = static_cast<uint32_t>(listed.value().size());
    if (record.num_devices == 0) set_text(record.reason, "no device was found");
  } else {
    set_text(record.reason, listed.error().message);
  }
  write_record(found, record);
}

int32_t internal::answer_info(const char* backend, const Result<std::vector<DeviceListing>>& listed,
                              uint32_t device, dflash_device_info* info, dflash_error* error) {
  if (!listed.ok()) return report(listed.error(), error);
  const size_t count = listed.value().size();
  if (device >= count) {
    return report(
        Error{ErrorCode::kInvalidArgument,
              std::string("device ") + backend + ":" + std::to_string(device) +
                  " does not exist; this machine has " + std::to_string(count) +
                  (count == 1 ? " such device, number 0" : " such devices, numbered from 0")},
        error);
  }
  const DeviceListing& found = listed.value()[device];
  auto record = new_record<dflash_device_info>();
  record.is_usable = found.reason.empty();
  record.memory_bytes = found.memory_bytes;
  set_text(record.name, found.name);
  set_text(record.vendor, found.vendor);
  set_text(record.arch, found.arch);
  set_text(record.reason, found.reason);
  write_record(info, record);
  return 0;
}

int32_t internal::answer_open(OpenDevice open, uint32_t device, const dflash_open_options* options,
                              dflash_device** opened, dflash_error* error) {
  return answered(error, [&]() -> Status {
    if (opened == nullptr) return missing("backend table: device");
    const dflash_open_options asked = read_record(options);
    auto made =
        open(device, OpenOptions{asked.num_threads == 0 ? 1 : asked.num_threads, asked.seed});
    if (!made.ok()) return std::move(made).error();
    auto box = std::make_unique<dflash_device>();
    box->device = std::move(made).value();
    *opened = box.release();
    return ok();
  });
}

dflash_backend_table internal::common_table() {
  dflash_backend_table table{};
  table.struct_size = sizeof table;
  table.abi_version = DFLASH_BACKEND_ABI_VERSION;
  table.version = DFLASH_VERSION;
  table.close = [](dflash_device* device) { delete device; };
  table.caps = &answer_caps;
  table.layer_bytes = &answer_layer_bytes;
  table.layer_define = &answer_layer_define;
  table.layer_drop = [](dflash_layer* layer) { delete layer; };
  table.layer_resident_bytes = [](const dflash_layer* layer) -> uint64_t {
    return layer == nullptr ? 0 : layer->experts->resident_bytes();
  };
  table.layer_device_ns = [](const dflash_layer* layer) -> int64_t {
    return layer == nullptr ? 0 : layer->experts->device_ns();
  };
  table.expert_load = &answer_expert_load;
  table.expert_checksum = &answer_expert_checksum;
  table.submit = &answer_submit;
  table.wait = &answer_wait;
  table.selftest = &answer_selftest;
  return table;
}

}  // namespace dflash::plugin

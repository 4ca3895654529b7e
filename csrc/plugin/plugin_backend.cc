// SPDX-License-Identifier: Apache-2.0
#include "plugin/plugin_backend.h"

#include <utility>

#include "compute/experts/layer_checks.h"
#include "compute/formats/plain_rows.h"
#include "plugin/abi_records.h"

namespace dflash::plugin {
namespace {

// The host judges a worker by its progress and ends calls by its own deadlines; this one only keeps
// a call into a plug-in finite.
constexpr int64_t kBatchTimeoutNs = 600'000'000'000;

// What a plug-in calls when it made progress. It runs on the thread that is in the plug-in, so a
// worker's serving thread may move bytes of its data path in this call.
dflash_progress relay_to(compute::YieldingProgress& progress) {
  return {&progress, [](void* context, uint64_t steps) {
            static_cast<compute::YieldingProgress*>(context)->count_and_yield(steps);
          }};
}

class PluginLayer final : public compute::ExpertLayer {
 public:
  PluginLayer(const dflash_backend_table& table, dflash_device* device, std::string label,
              dflash_layer* layer, const compute::FfnSpec& spec, uint32_t num_local_experts)
      : table_(table),
        device_(device),
        label_(std::move(label)),
        layer_(layer),
        spec_(spec),
        num_local_experts_(num_local_experts) {}
  ~PluginLayer() override { table_.layer_drop(layer_); }
  PluginLayer(const PluginLayer&) = delete;
  PluginLayer& operator=(const PluginLayer&) = delete;

  const compute::FfnSpec& spec() const override { return spec_; }
  uint32_t num_local_experts() const override { return num_local_experts_; }
  uint64_t resident_bytes() const override { return table_.layer_resident_bytes(layer_); }

  int64_t device_ns() const override { return table_.layer_device_ns(layer_); }

  Status load_expert(uint32_t local_expert_id, const compute::ExpertWeights& weights,
                     compute::YieldingProgress& progress) override {
    DFLASH_TRY(compute::check_expert(spec_, num_local_experts_, local_expert_id, weights));
    // The table knows no packings of checkpoints. What is made plain lives until the load is over.
    std::vector<std::byte> made[3];
    compute::ExpertWeights plain = weights;
    plain.gate = compute::plain_matrix(weights.gate, made[0]);
    plain.up = compute::plain_matrix(weights.up, made[1]);
    plain.down = compute::plain_matrix(weights.down, made[2]);
    const dflash_expert expert = to_record(local_expert_id, plain);
    const dflash_progress relay = relay_to(progress);
    auto error = new_record<dflash_error>();
    return done(table_.expert_load(layer_, &expert, &relay, &error), error);
  }

  std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const override {
    uint64_t checksum = 0;
    if (table_.expert_checksum == nullptr ||
        table_.expert_checksum(layer_, local_expert_id, &checksum) == 0)
      return std::nullopt;
    return checksum;
  }

  Status forward(const compute::ForwardArgs& args, compute::YieldingProgress& progress) override {
    const dflash_batch batch = to_record(args);
    const dflash_progress relay = relay_to(progress);
    auto error = new_record<dflash_error>();
    uint64_t ticket = 0;
    DFLASH_TRY(done(table_.submit(layer_, &batch, &ticket, &error), error));
    return done(table_.wait(device_, ticket, kBatchTimeoutNs, &relay, &error), error);
  }

 private:
  // kRange names row and column, which is what its reader needs; the others are about the device.
  Status done(int32_t status, const dflash_error& error) const {
    if (status == 0) return ok();
    Error failure = error_of(status, error);
    return failure.code == ErrorCode::kRange ? std::move(failure)
                                             : std::move(failure).with("device " + label_);
  }

  const dflash_backend_table& table_;
  dflash_device* device_;
  std::string label_;
  dflash_layer* layer_;
  compute::FfnSpec spec_;
  uint32_t num_local_experts_;
};

}  // namespace

struct PluginBackend::State {
  const dflash_backend_table& table;
  std::string label;
  DeviceListing listing;
  dflash_device* device;
  dflash_caps caps;

  Error failure(int32_t status, const dflash_error& error) const {
    return error_of(status, error).with("device " + label);
  }
};

PluginBackend::PluginBackend() = default;
PluginBackend::~PluginBackend() {
  if (state_ != nullptr) state_->table.close(state_->device);
}
const std::string& PluginBackend::label() const { return state_->label; }

Result<std::unique_ptr<PluginBackend>> PluginBackend::open(const dflash_backend_table& table,
                                                           uint32_t device,
                                                           const OpenOptions& options) {
  auto probe = new_record<dflash_probe>();
  table.probe(&probe);
  if (probe.num_devices == 0) {
    return Error{ErrorCode::kUnsupported, std::string("device ") + table.name + ":" +
                                              std::to_string(device) + ": " +
                                              text_of(probe.reason)};
  }
  auto error = new_record<dflash_error>();
  auto info = new_record<dflash_device_info>();
  if (const int32_t status = table.device_info(device, &info, &error); status != 0)
    return error_of(status, error);
  const std::string label =
      std::string(table.name) + ":" + std::to_string(device) + " (" + text_of(info.name) + ")";
  if (info.is_usable == 0)
    return Error{ErrorCode::kUnsupported, "device " + label + ": " + text_of(info.reason)};

  auto record = new_record<dflash_open_options>();
  record.num_threads = options.num_threads;
  record.seed = options.seed;
  dflash_device* opened = nullptr;
  if (const int32_t status = table.open(device, &record, &opened, &error); status != 0) {
    return error_of(status, error).with("device " + label);
  }
  const DeviceListing listing{text_of(info.name), text_of(info.vendor), text_of(info.arch),
                              info.memory_bytes, ""};
  std::unique_ptr<PluginBackend> backend(new PluginBackend());
  backend->state_ =
      std::make_unique<State>(State{table, label, listing, opened, new_record<dflash_caps>()});
  if (const int32_t status = table.caps(opened, &backend->state_->caps, &error); status != 0) {
    return backend->state_->failure(status, error);
  }
  return backend;
}

bool PluginBackend::computes(compute::NumericsClass numerics) const {
  return (state_->caps.numerics >> static_cast<uint32_t>(numerics) & 1u) != 0;
}

const DeviceListing& PluginBackend::listing() const { return state_->listing; }

Result<uint64_t> PluginBackend::free_bytes() const {
  auto error = new_record<dflash_error>();
  auto caps = new_record<dflash_caps>();
  if (const int32_t status = state_->table.caps(state_->device, &caps, &error); status != 0)
    return state_->failure(status, error);
  return caps.free_bytes;
}

Result<uint64_t> PluginBackend::predicted_bytes(const compute::FfnSpec& spec,
                                                uint32_t num_local_experts,
                                                compute::ResidentFormats formats,
                                                compute::NumericsClass numerics) const {
  const dflash_ffn_spec asked = to_record(spec);
  const dflash_layer_options options =
      to_record(LayerOptions{num_local_experts, formats, numerics});
  auto error = new_record<dflash_error>();
  uint64_t bytes = 0;
  if (const int32_t status =
          state_->table.layer_bytes(state_->device, &asked, &options, &bytes, &error);
      status != 0) {
    return state_->failure(status, error);
  }
  return bytes;
}

Result<std::unique_ptr<compute::ExpertLayer>> PluginBackend::create_layer(
    const compute::FfnSpec& spec, uint32_t num_local_experts, compute::ResidentFormats formats,
    compute::NumericsClass numerics) {
  auto needed = predicted_bytes(spec, num_local_experts, formats, numerics);
  if (!needed.ok()) return std::move(needed).error();
  auto available = free_bytes();
  if (!available.ok()) return std::move(available).error();
  if (const uint64_t left = available.value(); needed.value() > left) {
    const uint64_t per_expert = needed.value() / num_local_experts;
    return Error{ErrorCode::kOutOfMemory,
                 "device " + state_->label + ": " + std::to_string(num_local_experts) +
                     " experts of this layer need " + std::to_string(needed.value()) + " bytes, " +
                     std::to_string(left) + " are free: " + std::to_string(needed.value() - left) +
                     " short; at most " + std::to_string(per_expert == 0 ? 0 : left / per_expert) +
                     " experts fit"};
  }
  const dflash_ffn_spec asked = to_record(spec);
  const dflash_layer_options options =
      to_record(LayerOptions{num_local_experts, formats, numerics});
  auto error = new_record<dflash_error>();
  dflash_layer* layer = nullptr;
  if (const int32_t status =
          state_->table.layer_define(state_->device, &asked, &options, &layer, &error);
      status != 0) {
    return state_->failure(status, error);
  }
  return std::unique_ptr<compute::ExpertLayer>(std::make_unique<PluginLayer>(
      state_->table, state_->device, state_->label, layer, spec, num_local_experts));
}

Result<SelfTestResult> PluginBackend::self_test(uint32_t test_case) {
  auto error = new_record<dflash_error>();
  auto record = new_record<dflash_selftest>();
  if (const int32_t status = state_->table.selftest(state_->device, test_case, &record, &error);
      status != 0) {
    return state_->failure(status, error);
  }
  return SelfTestResult{record.num_cases, record.elements, record.differing, text_of(record.kernel),
                        text_of(record.formats)};
}

}  // namespace dflash::plugin

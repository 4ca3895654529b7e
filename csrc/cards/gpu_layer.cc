// Loading experts into device memory, and the layer's life. gpu_forward.cc computes.
// SPDX-License-Identifier: Apache-2.0
#include "cards/gpu_layer.h"

#include <algorithm>
#include <string>

#include "base/float_mode.h"
#include "cards/pack_records.h"
#include "cards/record_layout.h"
#include "compute/experts/layer_checks.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/value_checks.h"

namespace dflash::compute::gpu {
namespace {

constexpr uint64_t kAlignment = 256;
// How much is packed before each copy. It bounds the host's memory, and the time without progress.
constexpr uint64_t kLoadBytes = uint64_t{1} << 20;

uint64_t aligned(uint64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

uint64_t matrix_bytes(WeightFormat format, uint32_t outputs, uint32_t inputs) {
  return aligned(panel_bytes(format, inputs) * num_panels(outputs));
}

std::string classes_of(const DeviceFacts& device) {
  std::string names;
  for (const NumericsFacts& facts : numerics_table()) {
    if (device_computes(device, facts.numerics))
      names += std::string(names.empty() ? "" : ", ") + facts.name;
  }
  return names;
}

}  // namespace

bool device_computes(const DeviceFacts& device, NumericsClass numerics) {
  const Offers& offers = numerics_facts(numerics).offers;
  return is_offered(device.backend.ends_with("cuda") ? offers.cuda : offers.hip,
                    device.architecture);
}

ExpertPlaces::ExpertPlaces(const FfnSpec& spec, ResidentFormats formats) {
  const bool has_gate = spec.gate != GateKind::kNone;
  const uint64_t first_bytes = matrix_bytes(formats.gate_up, spec.intermediate_size, spec.in_size);
  const auto place_bias = [this](bool is_there, uint32_t outputs, uint64_t& bias) {
    if (!is_there) return;
    bias = num_bytes;
    num_bytes += aligned(uint64_t{num_panels(outputs)} * kPanelWidth * sizeof(float));
  };
  up = has_gate ? first_bytes : 0;
  down = up + first_bytes;
  num_bytes = down + matrix_bytes(formats.down, spec.out_size, spec.intermediate_size);
  place_bias(has_gate && spec.has_gate_up_bias, spec.intermediate_size, gate_bias);
  place_bias(spec.has_gate_up_bias, spec.intermediate_size, up_bias);
  place_bias(spec.has_down_bias, spec.out_size, down_bias);
}

uint64_t GpuLayer::predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                   ResidentFormats formats) {
  return ExpertPlaces(spec, formats).num_bytes * num_local_experts;
}

Result<std::unique_ptr<ExpertLayer>> GpuLayer::create(std::shared_ptr<GpuDevice> device,
                                                      const FfnSpec& spec,
                                                      uint32_t num_local_experts,
                                                      ResidentFormats formats,
                                                      NumericsClass numerics) {
  DFLASH_TRY(spec.validate());
  DFLASH_TRY(check_numerics(numerics, formats));
  for (WeightFormat format : {formats.gate_up, formats.down}) {
    if (is_card_format(format)) continue;
    return Error{ErrorCode::kUnsupported, std::string("weights in ") + format_name(format) +
                                              " have no kernel on cards; give these experts to "
                                              "processors"};
  }
  if (!device_computes(device->facts(), numerics)) {
    return Error{ErrorCode::kUnsupported, device->name() + " does not compute numerics class " +
                                              numerics_name(numerics) + "; it computes " +
                                              classes_of(device->facts())};
  }
  if (num_local_experts < 1 || num_local_experts > 65535) {
    return Error{ErrorCode::kUnsupported, "a layer has " + std::to_string(num_local_experts) +
                                              " local experts; supported: 1..65535"};
  }
  const uint64_t expert_bytes = ExpertPlaces(spec, formats).num_bytes,
                 wanted = expert_bytes * num_local_experts;
  const auto free_bytes = device->free_bytes();
  if (!free_bytes.ok()) return Error{free_bytes.error().code, free_bytes.error().message};
  if (wanted > free_bytes.value()) {
    return Error{ErrorCode::kOutOfMemory,
                 device->name() + ": " + std::to_string(num_local_experts) + " experts need " +
                     std::to_string(wanted) + " bytes, " +
                     std::to_string(wanted - free_bytes.value()) + " more than are free; at most " +
                     std::to_string(free_bytes.value() / expert_bytes) + " of them fit"};
  }
  auto experts = device->allocate(wanted);
  if (!experts.ok()) return std::move(experts).error();
  return std::unique_ptr<ExpertLayer>(
      new GpuLayer(std::move(device), spec, num_local_experts, formats, numerics, experts.value()));
}

GpuLayer::GpuLayer(std::shared_ptr<GpuDevice> device, const FfnSpec& spec,
                   uint32_t num_local_experts, ResidentFormats formats, NumericsClass numerics,
                   std::byte* experts)
    : device_(std::move(device)),
      spec_(spec),
      num_local_experts_(num_local_experts),
      formats_(formats),
      numerics_(numerics_facts(numerics)),
      places_(spec, formats),
      experts_(experts),
      is_loaded_(num_local_experts, 0),
      checksums_(num_local_experts, 0) {}

GpuLayer::~GpuLayer() { device_->release(experts_); }

uint64_t GpuLayer::resident_bytes() const {
  return places_.num_bytes *
         static_cast<uint64_t>(std::count(is_loaded_.begin(), is_loaded_.end(), 1));
}

Status GpuLayer::load_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                             YieldingProgress& progress) {
  DFLASH_TRY(check_expert(spec_, num_local_experts_, local_expert_id, weights));
  DFLASH_TRY(check_resident("gate", weights.gate, formats_.gate_up));
  DFLASH_TRY(check_resident("up", weights.up, formats_.gate_up));
  DFLASH_TRY(check_resident("down", weights.down, formats_.down));
  const CanonicalFloatMode mode;  // because quantising rounds
  is_loaded_[local_expert_id] = 0;
  std::byte* expert = experts_ + local_expert_id * places_.num_bytes;
  ExpertChecksum sums;
  if (weights.gate.data != nullptr)
    DFLASH_TRY(load_matrix("gate", weights.gate, formats_.gate_up, expert + places_.gate, sums.gate,
                           progress));
  DFLASH_TRY(
      load_matrix("up", weights.up, formats_.gate_up, expert + places_.up, sums.up, progress));
  DFLASH_TRY(
      load_matrix("down", weights.down, formats_.down, expert + places_.down, sums.down, progress));
  if (places_.gate_bias != kNoBias)
    DFLASH_TRY(load_bias(weights.gate_bias, expert + places_.gate_bias, progress));
  if (places_.up_bias != kNoBias)
    DFLASH_TRY(load_bias(weights.up_bias, expert + places_.up_bias, progress));
  if (places_.down_bias != kNoBias)
    DFLASH_TRY(load_bias(weights.down_bias, expert + places_.down_bias, progress));
  checksums_[local_expert_id] = sums.finish(weights);
  is_loaded_[local_expert_id] = 1;
  return ok();
}

std::optional<uint64_t> GpuLayer::content_checksum(uint32_t local_expert_id) const {
  if (is_loaded_[local_expert_id] == 0) return std::nullopt;
  return checksums_[local_expert_id];
}

Status GpuLayer::load_matrix(const char* name, const MatrixView& matrix, WeightFormat resident,
                             std::byte* device, MatrixChecksum& sum, YieldingProgress& progress) {
  const uint64_t step = panel_bytes(resident, matrix.inputs);
  const uint32_t panels = num_panels(matrix.outputs);
  const auto per_copy = static_cast<uint32_t>(std::clamp<uint64_t>(kLoadBytes / step, 1, panels));
  std::vector<std::byte> packed(per_copy * step);
  for (uint32_t first = 0; first < panels; first += per_copy) {
    const uint32_t count = std::min(per_copy, panels - first);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t output = (first + i) * kPanelWidth;
      const uint32_t outputs = std::min(kPanelWidth, matrix.outputs - output);
      DFLASH_TRY(check_values(name, matrix, resident, output, outputs));
      sum.add(matrix, 0, output, outputs);
      pack_panel(matrix, resident, first + i, packed.data() + i * step);
      // In a worker, the serving thread may move bytes of its data path here.
      progress.count_and_yield();
    }
    DFLASH_TRY(device_->store(device + first * step, packed.data(), count * step, progress));
  }
  return ok();
}

Status GpuLayer::load_bias(const VectorView& bias, std::byte* device, YieldingProgress& progress) {
  const std::vector<float> wide = widen_vector(bias, num_panels(bias.count) * kPanelWidth);
  return device_->store(device, reinterpret_cast<const std::byte*>(wide.data()),
                        wide.size() * sizeof(float), progress);
}

}  // namespace dflash::compute::gpu

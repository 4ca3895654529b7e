// Loads, packs and finds the resident weights of the CPU backend, see packed_experts.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/packed_experts.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/float_mode.h"
#include "compute/cpu/panels/pack.h"
#include "compute/experts/layer_checks.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/value_checks.h"

namespace dflash::compute {
namespace {

uint32_t divide_up(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

}  // namespace

void PackedExperts::set_sizes(const FfnSpec& spec, ResidentFormats formats, uint32_t panel_width) {
  formats_ = formats;
  panel_width_ = panel_width;
  num_matrices_ = spec.gate == GateKind::kNone ? 1 : 2;
  num_intermediate_panels_ = divide_up(spec.intermediate_size, panel_width);
  num_out_panels_ = divide_up(spec.out_size, panel_width);
  in_size_ = spec.in_size;
  intermediate_size_ = spec.intermediate_size;
  gate_up_panel_bytes_ = panel_bytes(panel_format(formats.gate_up), spec.in_size, panel_width);
  down_panel_bytes_ = panel_bytes(panel_format(formats.down), spec.intermediate_size, panel_width);
  const size_t num_bytes = gate_up_panel_bytes_ * num_matrices_ * num_intermediate_panels_ +
                           down_panel_bytes_ * num_out_panels_;
  expert_bytes_ = (num_bytes + 63) / 64 * 64;  // so that every expert starts on a cache line
  if (spec.has_gate_up_bias) {
    const size_t count = size_t{num_matrices_} * num_intermediate_panels_ * panel_width;
    num_gate_up_bias_ = (count + 7) / 8 * 8;  // so that sums of its pieces are one sum of all
  }
  if (spec.has_down_bias) num_down_bias_ = size_t{num_out_panels_} * panel_width;
}

Result<PackedExperts> PackedExperts::create(const FfnSpec& spec, uint32_t num_local_experts,
                                            ResidentFormats formats, const KernelSet& kernels,
                                            WeightsLayout layout) {
  PackedExperts packed;
  for (WeightFormat format : {formats.gate_up, formats.down}) {
    if (layout == WeightsLayout::kMapped && !format_facts(format).is_stored) {
      return Error{
          ErrorCode::kUnsupported,
          std::string("weights_layout: mapped computes with what the checkpoint holds, and ") +
              format_name(format) +
              " is only made at load; use weights_layout: packed or weights: auto"};
    }
  }
  for (WeightFormat format : {formats.gate_up, formats.down}) {
    if (layout == WeightsLayout::kPacked) DFLASH_TRY(check_panels("an expert", format));
  }
  packed.layout_ = layout;
  packed.set_sizes(spec, formats, kernels.panel_width);
  packed.packer_ = MatrixPacker(kernels);
  packed.has_bf16_pairs_ = kernels.pack != nullptr;  // pack_bf16_pairs is the only other one
  packed.experts_.resize(num_local_experts);
  if (layout == WeightsLayout::kMapped) return packed;
  auto panels = PageBuffer::create(packed.expert_bytes_ * num_local_experts);
  if (!panels.ok()) return std::move(panels).error();
  packed.panels_ = std::move(panels).value();
  return packed;
}

uint64_t PackedExperts::predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                        ResidentFormats formats, uint32_t panel_width) {
  PackedExperts sizes;
  sizes.set_sizes(spec, formats, panel_width);
  return uint64_t{sizes.expert_bytes_} * num_local_experts;
}

std::vector<float> PackedExperts::pack_gate_up_bias(const ExpertWeights& weights) const {
  const uint32_t padded = num_intermediate_panels_ * panel_width_;
  std::vector<float> up = widen_vector(weights.up_bias, padded);
  if (num_matrices_ == 1) up.resize(num_gate_up_bias_);
  if (up.empty() || num_matrices_ == 1) return up;
  const std::vector<float> gate = widen_vector(weights.gate_bias, padded);
  std::vector<float> both;
  both.reserve(2 * size_t{padded});
  for (uint32_t panel = 0; panel < num_intermediate_panels_; ++panel) {
    const auto begin = static_cast<std::ptrdiff_t>(size_t{panel} * panel_width_);
    const auto end = begin + static_cast<std::ptrdiff_t>(panel_width_);
    both.insert(both.end(), gate.begin() + begin, gate.begin() + end);
    both.insert(both.end(), up.begin() + begin, up.begin() + end);
  }
  both.resize(num_gate_up_bias_);
  return both;
}

Status PackedExperts::load(const FfnSpec& spec, uint32_t local_expert_id,
                           const ExpertWeights& weights, YieldingProgress& progress) {
  DFLASH_TRY(check_expert(spec, num_local_experts(), local_expert_id, weights));
  DFLASH_TRY(check_resident("gate", weights.gate, formats_.gate_up));
  DFLASH_TRY(check_resident("up", weights.up, formats_.gate_up));
  DFLASH_TRY(check_resident("down", weights.down, formats_.down));
  const CanonicalFloatMode mode;  // because quantising rounds
  Expert& expert = experts_[local_expert_id];
  expert.is_loaded = false;
  if (is_mapped()) {
    if (weights.gate.data != nullptr)
      DFLASH_TRY(packer_.check("gate", weights.gate, formats_.gate_up, progress));
    DFLASH_TRY(packer_.check("up", weights.up, formats_.gate_up, progress));
    DFLASH_TRY(packer_.check("down", weights.down, formats_.down, progress));
    expert.gate = weights.gate;
    expert.up = weights.up;
    expert.down = weights.down;
  } else {
    DFLASH_TRY(pack_expert(local_expert_id, weights, progress));
  }
  expert.own_gate_up_bias = pack_gate_up_bias(weights);
  expert.own_down_bias = widen_vector(weights.down_bias, num_out_panels_ * panel_width_);
  expert.gate_up_bias = expert.own_gate_up_bias;
  expert.down_bias = expert.own_down_bias;
  expert.is_loaded = true;
  return ok();
}

std::optional<PanelForm> PackedExperts::form() const {
  if (is_mapped()) return std::nullopt;
  return PanelForm{panel_width_,
                   has_bf16_pairs_,
                   formats_,
                   expert_bytes_,
                   sizeof(float) * (num_gate_up_bias_ + num_down_bias_),
                   gate_up_panel_bytes_ * num_matrices_ * num_intermediate_panels_};
}

Status PackedExperts::map(uint32_t local_expert_id, std::span<const std::byte> panels,
                          uint64_t content_checksum) {
  const std::optional<PanelForm> expected = form();
  if (!expected) return Error{ErrorCode::kUnsupported, "weights_layout: mapped takes no panels"};
  if (panels.size() != expected->num_bytes() ||
      reinterpret_cast<uintptr_t>(panels.data()) % 64 != 0) {
    return Error{ErrorCode::kInvalidArgument,
                 "an expert's panels have " + std::to_string(panels.size()) + " bytes, expected " +
                     std::to_string(expected->num_bytes()) + " on a cache line"};
  }
  Expert& expert = experts_[local_expert_id];
  const bool had_own = expert.panels == own_panels(local_expert_id);
  const auto* biases = reinterpret_cast<const float*>(panels.data() + expert_bytes_);
  expert.panels = panels.data();
  expert.gate_up_bias = {biases, num_gate_up_bias_};
  expert.down_bias = {biases + num_gate_up_bias_, num_down_bias_};
  expert.own_gate_up_bias = {};
  expert.own_down_bias = {};
  expert.checksum = content_checksum;
  expert.is_loaded = true;
  if (had_own) panels_.forget(local_expert_id * expert_bytes_, expert_bytes_);
  return ok();
}

Status PackedExperts::pack_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                                  YieldingProgress& progress) {
  std::byte* gate_up = own_panels(local_expert_id);
  std::byte* up = gate_up + (num_matrices_ - 1) * gate_up_panel_bytes_;
  const size_t step = gate_up_panel_bytes_ * num_matrices_;
  std::vector<std::byte> read;
  ExpertChecksum sums;
  if (weights.gate.data != nullptr)
    DFLASH_TRY(packer_.pack("gate", weights.gate, {formats_.gate_up, gate_up, step}, read,
                            sums.gate, progress));
  DFLASH_TRY(packer_.pack("up", weights.up, {formats_.gate_up, up, step}, read, sums.up, progress));
  std::byte* down = gate_up + step * num_intermediate_panels_;
  DFLASH_TRY(packer_.pack("down", weights.down, {formats_.down, down, down_panel_bytes_}, read,
                          sums.down, progress));
  experts_[local_expert_id].panels = gate_up;
  experts_[local_expert_id].checksum = sums.finish(weights);
  return ok();
}

namespace {

// Returns room for `num_bytes` bytes of panels, which stays valid until the scratch's next use.
Result<std::byte*> room_for(size_t num_bytes, PanelScratch& scratch) {
  if (scratch.panels.num_bytes() < num_bytes) {
    scratch.panels = PageBuffer();
    auto grown = PageBuffer::create(num_bytes);
    if (!grown.ok()) return std::move(grown).error();
    scratch.panels = std::move(grown).value();
  }
  return scratch.panels.data();
}

}  // namespace

Result<PanelRun> PackedExperts::read_gate_up(uint32_t local_expert_id, uint32_t first_panel,
                                             uint32_t num_panels, PanelScratch& scratch) const {
  PanelRun run = gate_up(local_expert_id, first_panel, num_panels);
  if (!is_mapped()) return run;
  const Expert& expert = experts_[local_expert_id];
  const size_t step = gate_up_panel_bytes_ * num_matrices_;
  auto room = room_for(step * num_panels, scratch);
  if (!room.ok()) return std::move(room).error();
  std::byte* up = room.value() + (num_matrices_ - 1) * gate_up_panel_bytes_;
  if (num_matrices_ == 2)
    DFLASH_TRY(packer_.pack_panels(expert.gate, first_panel, num_panels,
                                   {panel_format(formats_.gate_up), room.value(), step},
                                   scratch.read));
  DFLASH_TRY(packer_.pack_panels(expert.up, first_panel, num_panels,
                                 {panel_format(formats_.gate_up), up, step}, scratch.read));
  run.first = room.value();
  return run;
}

Result<PanelRun> PackedExperts::read_down(uint32_t local_expert_id, uint32_t first_panel,
                                          uint32_t num_panels, PanelScratch& scratch) const {
  PanelRun run = down(local_expert_id, first_panel, num_panels);
  if (!is_mapped()) return run;
  auto room = room_for(down_panel_bytes_ * num_panels, scratch);
  if (!room.ok()) return std::move(room).error();
  const PanelTarget target{panel_format(formats_.down), room.value(), down_panel_bytes_};
  DFLASH_TRY(packer_.pack_panels(experts_[local_expert_id].down, first_panel, num_panels, target,
                                 scratch.read));
  run.first = room.value();
  return run;
}

std::optional<uint64_t> PackedExperts::content_checksum(uint32_t local_expert_id) const {
  const Expert& expert = experts_[local_expert_id];
  if (is_mapped() || !expert.is_loaded) return std::nullopt;
  return expert.checksum;
}

std::array<std::span<const std::byte>, 3> PackedExperts::resident_pieces(
    uint32_t local_expert_id) const {
  const Expert& expert = experts_[local_expert_id];
  if (is_mapped() || !expert.is_loaded) return {};
  return {std::span<const std::byte>(expert.panels, expert_bytes_),
          std::as_bytes(expert.gate_up_bias), std::as_bytes(expert.down_bias)};
}

uint64_t PackedExperts::resident_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t id = 0; id < num_local_experts(); ++id) {
    const Expert& expert = experts_[id];
    const bool has_own_panels = expert.panels != nullptr && expert.panels == own_panels(id);
    if (expert.is_loaded)
      bytes += (has_own_panels ? expert_bytes_ : 0) +
               sizeof(float) * (expert.own_gate_up_bias.size() + expert.own_down_bias.size());
  }
  return bytes;
}

PanelRun PackedExperts::gate_up(uint32_t local_expert_id, uint32_t first_panel,
                                uint32_t num_panels) const {
  const size_t first = size_t{first_panel} * num_matrices_;
  const Expert& expert = experts_[local_expert_id];
  const std::span<const float> bias = expert.gate_up_bias;
  return {.first = is_mapped() ? nullptr : expert.panels + first * gate_up_panel_bytes_,
          .format = panel_format(formats_.gate_up),
          .panel_bytes = gate_up_panel_bytes_,
          .num_panels = num_panels * num_matrices_,
          .num_inputs = in_size_,
          .bias = bias.empty() ? nullptr : bias.data() + first * panel_width_};
}

PanelRun PackedExperts::down(uint32_t local_expert_id, uint32_t first_panel,
                             uint32_t num_panels) const {
  const size_t gate_up_bytes = gate_up_panel_bytes_ * num_matrices_ * num_intermediate_panels_;
  const Expert& expert = experts_[local_expert_id];
  const std::span<const float> bias = expert.down_bias;
  const size_t offset = gate_up_bytes + first_panel * down_panel_bytes_;
  return {.first = is_mapped() ? nullptr : expert.panels + offset,
          .format = panel_format(formats_.down),
          .panel_bytes = down_panel_bytes_,
          .num_panels = num_panels,
          .num_inputs = intermediate_size_,
          .bias = bias.empty() ? nullptr : bias.data() + size_t{first_panel} * panel_width_};
}

}  // namespace dflash::compute

// Resident weights of the CPU backend, see packed_experts.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/packed_experts.h"

#include <algorithm>
#include <string>
#include <utility>

#include "compute/cpu/pack.h"
#include "compute/layer_checks.h"

namespace dflash::compute {
namespace {

uint32_t divide_up(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

Status check_dtype(const char* name, const MatrixView& matrix, Dtype resident) {
  if (matrix.data == nullptr || matrix.dtype == resident || resident == Dtype::kF32) return ok();
  return Error{ErrorCode::kUnsupported, std::string(name) + " is stored in " + dtype_name(matrix.dtype) + ", which resident dtype " +
                                            dtype_name(resident) + " cannot hold exactly; keep this layer in f32"};
}

}  // namespace

Result<PackedExperts> PackedExperts::create(const FfnSpec& spec, uint32_t num_local_experts, Dtype dtype, uint32_t panel_width) {
  PackedExperts packed;
  packed.dtype_ = dtype;
  packed.panel_width_ = panel_width;
  packed.num_matrices_ = spec.gate == GateKind::kNone ? 1 : 2;
  packed.num_intermediate_panels_ = divide_up(spec.intermediate_size, panel_width);
  packed.num_out_panels_ = divide_up(spec.out_size, panel_width);
  packed.in_size_ = spec.in_size;
  packed.intermediate_size_ = spec.intermediate_size;
  packed.gate_up_panel_elements_ = size_t{spec.in_size} * panel_width;
  packed.down_panel_elements_ = size_t{spec.intermediate_size} * panel_width;
  const size_t num_elements = packed.gate_up_panel_elements_ * packed.num_matrices_ * packed.num_intermediate_panels_ +
                              packed.down_panel_elements_ * packed.num_out_panels_;
  packed.expert_bytes_ = (num_elements * dtype_bytes(dtype) + 63) / 64 * 64;  // each expert starts on a cache line
  auto panels = PageBuffer::create(packed.expert_bytes_ * num_local_experts);
  if (!panels.ok()) return std::move(panels).error();
  packed.panels_ = std::move(panels).value();
  packed.experts_.resize(num_local_experts);
  return packed;
}

void PackedExperts::pack_matrix(const MatrixView& matrix, std::byte* first_panel, size_t panel_step_bytes,
                                ProgressCounter& progress) const {
  const uint32_t num_panels = divide_up(matrix.outputs, panel_width_);
  for (uint32_t panel = 0; panel < num_panels; ++panel) {
    pack_panel(matrix, dtype_, panel, panel_width_, first_panel + panel * panel_step_bytes);
    progress.fetch_add(1, std::memory_order_relaxed);
  }
}

std::vector<float> PackedExperts::pack_gate_up_bias(const ExpertWeights& weights) const {
  const uint32_t padded = num_intermediate_panels_ * panel_width_;
  const std::vector<float> up = widen_vector(weights.up_bias, padded);
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
  return both;
}

Status PackedExperts::load(const FfnSpec& spec, uint32_t local_expert_id, const ExpertWeights& weights, ProgressCounter& progress) {
  DFLASH_TRY(check_expert(spec, num_local_experts(), local_expert_id, weights));
  DFLASH_TRY(check_dtype("gate", weights.gate, dtype_));
  DFLASH_TRY(check_dtype("up", weights.up, dtype_));
  DFLASH_TRY(check_dtype("down", weights.down, dtype_));
  std::byte* gate_up = panels_.data() + local_expert_id * expert_bytes_;
  const size_t step = gate_up_panel_bytes() * num_matrices_;
  if (weights.gate.data != nullptr) pack_matrix(weights.gate, gate_up, step, progress);
  pack_matrix(weights.up, gate_up + (num_matrices_ - 1) * gate_up_panel_bytes(), step, progress);
  pack_matrix(weights.down, gate_up + step * num_intermediate_panels_, down_panel_bytes(), progress);
  Expert& expert = experts_[local_expert_id];
  expert.gate_up_bias = pack_gate_up_bias(weights);
  expert.down_bias = widen_vector(weights.down_bias, num_out_panels_ * panel_width_);
  expert.is_loaded = true;
  return ok();
}

uint64_t PackedExperts::resident_bytes() const {
  uint64_t bytes = 0;
  for (const Expert& expert : experts_) {
    if (expert.is_loaded) bytes += expert_bytes_ + 4 * (expert.gate_up_bias.size() + expert.down_bias.size());
  }
  return bytes;
}

PanelRun PackedExperts::gate_up(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels) const {
  const size_t first = size_t{first_panel} * num_matrices_;
  const std::vector<float>& bias = experts_[local_expert_id].gate_up_bias;
  return {.first = panels_.data() + local_expert_id * expert_bytes_ + first * gate_up_panel_bytes(),
          .panel_elements = gate_up_panel_elements_,
          .num_panels = num_panels * num_matrices_,
          .num_inputs = in_size_,
          .bias = bias.empty() ? nullptr : bias.data() + first * panel_width_};
}

PanelRun PackedExperts::down(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels) const {
  const size_t gate_up_bytes = gate_up_panel_bytes() * num_matrices_ * num_intermediate_panels_;
  const std::vector<float>& bias = experts_[local_expert_id].down_bias;
  return {.first = panels_.data() + local_expert_id * expert_bytes_ + gate_up_bytes + first_panel * down_panel_bytes(),
          .panel_elements = down_panel_elements_,
          .num_panels = num_panels,
          .num_inputs = intermediate_size_,
          .bias = bias.empty() ? nullptr : bias.data() + size_t{first_panel} * panel_width_};
}

}  // namespace dflash::compute

// The weights of one layer's experts as they stay in memory: per expert the gate and up panels alternating, then the down panels,
// in the resident formats; biases in float32.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/cpu/kernel_set.h"
#include "compute/cpu/page_buffer.h"
#include "compute/expert_layer.h"

namespace dflash::compute {

class PackedExperts {
 public:
  // Errors: kOutOfMemory.
  static Result<PackedExperts> create(const FfnSpec& spec, uint32_t num_local_experts, ResidentFormats formats, const KernelSet& kernels);
  // Bytes that create() will hold for these experts, biases aside.
  static uint64_t predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts, ResidentFormats formats, uint32_t panel_width);

  // Different experts may load from different threads. Errors as ExpertLayer::load_expert; kUnsupported where the resident
  // format cannot hold the source exactly.
  Status load(const FfnSpec& spec, uint32_t local_expert_id, const ExpertWeights& weights, ProgressCounter& progress);

  bool is_loaded(uint32_t local_expert_id) const { return experts_[local_expert_id].is_loaded; }
  uint32_t num_local_experts() const { return static_cast<uint32_t>(experts_.size()); }
  ResidentFormats formats() const { return formats_; }
  uint64_t resident_bytes() const;

  uint32_t num_matrices() const { return num_matrices_; }                    // of the first projection: gate and up, or up alone
  uint32_t num_intermediate_panels() const { return num_intermediate_panels_; }  // per matrix
  uint32_t num_out_panels() const { return num_out_panels_; }
  size_t gate_up_panel_bytes() const { return gate_up_panel_bytes_; }
  size_t down_panel_bytes() const { return down_panel_bytes_; }

  // Panels of intermediate columns [first_panel, first_panel + num_panels) * panel_width; with a gate twice as many panels.
  PanelRun gate_up(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels) const;
  PanelRun down(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels) const;

 private:
  struct Expert {
    bool is_loaded = false;
    std::vector<float> gate_up_bias;  // in panel order, padded with zeros; empty: none
    std::vector<float> down_bias;
  };

  void set_sizes(const FfnSpec& spec, ResidentFormats formats, uint32_t panel_width);
  // Where the panels of a matrix go, and in which format.
  struct PanelTarget {
    WeightFormat format;
    std::byte* first;
    size_t step_bytes;
  };

  Status pack_matrix(const char* name, const MatrixView& matrix, const PanelTarget& target, std::vector<std::byte>& read,
                     ProgressCounter& progress) const;
  std::vector<float> pack_gate_up_bias(const ExpertWeights& weights) const;

  ResidentFormats formats_;
  decltype(KernelSet::pack) pack_ = nullptr;
  uint32_t panel_width_ = 0;
  uint32_t num_matrices_ = 0;
  uint32_t num_intermediate_panels_ = 0;
  uint32_t num_out_panels_ = 0;
  uint32_t in_size_ = 0;
  uint32_t intermediate_size_ = 0;
  size_t gate_up_panel_bytes_ = 0;
  size_t down_panel_bytes_ = 0;
  size_t expert_bytes_ = 0;
  PageBuffer panels_;  // [num_local_experts] x expert_bytes_
  std::vector<Expert> experts_;
};

}  // namespace dflash::compute

// The weights of one layer's experts as they stay in memory: per expert the gate and up panels
// alternating, then the down panels, in the resident formats; biases in float32. Or, with layout
// `mapped`, only where they lie in the checkpoint: panels are then packed for each task that wants
// them, the same bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "compute/cpu/page_buffer.h"
#include "compute/cpu/panels/matrix_packer.h"
#include "compute/experts/content_checksum.h"
#include "compute/experts/expert_layer.h"

namespace dflash::compute {

// Where one thread packs the panels of layout `mapped`; empty otherwise.
struct PanelScratch {
  PageBuffer panels;
  std::vector<std::byte> read;
};

class PackedExperts {
 public:
  // Errors: kOutOfMemory; kUnsupported for layout `mapped` with a format that is only made at load.
  static Result<PackedExperts> create(const FfnSpec& spec, uint32_t num_local_experts,
                                      ResidentFormats formats, const KernelSet& kernels,
                                      WeightsLayout layout = WeightsLayout::kPacked);
  // Bytes that create() will hold for these experts, biases aside.
  static uint64_t predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                  ResidentFormats formats, uint32_t panel_width);

  // Different experts may load from different threads. Errors as ExpertLayer::load_expert;
  // kUnsupported where the resident format cannot hold the source exactly.
  Status load(const FfnSpec& spec, uint32_t local_expert_id, const ExpertWeights& weights,
              YieldingProgress& progress);

  // As ExpertLayer's.
  std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const;
  bool is_loaded(uint32_t local_expert_id) const { return experts_[local_expert_id].is_loaded; }
  uint32_t num_local_experts() const { return static_cast<uint32_t>(experts_.size()); }
  ResidentFormats formats() const { return formats_; }
  uint64_t resident_bytes() const;

  // of the first projection: gate and up, or up alone
  uint32_t num_matrices() const { return num_matrices_; }
  uint32_t num_intermediate_panels() const { return num_intermediate_panels_; }  // per matrix
  uint32_t num_out_panels() const { return num_out_panels_; }
  size_t gate_up_panel_bytes() const { return gate_up_panel_bytes_; }
  size_t down_panel_bytes() const { return down_panel_bytes_; }

  bool is_mapped() const { return layout_ == WeightsLayout::kMapped; }
  // The two below for either layout. `scratch` holds the panels of layout `mapped` until its next
  // use. Errors there: kCheckpoint naming the file, kOutOfMemory.
  Result<PanelRun> read_gate_up(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels,
                                PanelScratch& scratch) const;
  Result<PanelRun> read_down(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels,
                             PanelScratch& scratch) const;

  // Layout `packed` only. Panels of intermediate columns [first_panel, first_panel + num_panels) *
  // panel_width; with a gate twice as many.
  PanelRun gate_up(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels) const;
  PanelRun down(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels) const;

 private:
  struct Expert {
    bool is_loaded = false;
    std::vector<float> gate_up_bias;  // in panel order, padded with zeros; empty: none
    std::vector<float> down_bias;
    MatrixView gate, up, down;  // layout `mapped`
    uint64_t checksum = 0;      // layout `packed`
  };

  void set_sizes(const FfnSpec& spec, ResidentFormats formats, uint32_t panel_width);
  Status pack_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                     YieldingProgress& progress);
  std::vector<float> pack_gate_up_bias(const ExpertWeights& weights) const;

  ResidentFormats formats_;
  WeightsLayout layout_ = WeightsLayout::kPacked;
  MatrixPacker packer_;
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

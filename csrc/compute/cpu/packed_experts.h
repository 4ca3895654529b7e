// The weights of one layer's experts as they stay in memory. With layout `packed`, an expert has
// its gate and up panels alternating and then its down panels, in the resident formats; they lie in
// memory of the layer's own, or in a file of panels that somebody has mapped. With layout
// `mapped`, only their place in the checkpoint is kept, and each task packs the panels it wants
// into scratch of its thread; the bytes are the same. Biases are float32 in memory under either
// layout.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "compute/cpu/page_buffer.h"
#include "compute/cpu/panels/matrix_packer.h"
#include "compute/experts/content_checksum.h"
#include "compute/experts/expert_layer.h"

namespace dflash::compute {

// Where one thread packs panels under layout `mapped`; it stays empty under the other.
struct PanelScratch {
  PageBuffer panels;
  std::vector<std::byte> read;
};

// load() writes the one expert that it is given. Meanwhile nobody may read that expert or ask for
// resident_bytes(), which reads all of them; other experts may be loaded and read. Everything else
// only reads, and may run on any thread. map() follows the rules of load().
class PackedExperts {
 public:
  // Errors: kOutOfMemory; kUnsupported for layout `mapped` with a format that is only made at load.
  static Result<PackedExperts> create(const FfnSpec& spec, uint32_t num_local_experts,
                                      ResidentFormats formats, const KernelSet& kernels,
                                      WeightsLayout layout = WeightsLayout::kPacked);
  // Bytes that create() will hold for these experts with layout `packed`, without their biases.
  static uint64_t predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                  ResidentFormats formats, uint32_t panel_width);

  // Different experts may be loaded from different threads. Errors are those of
  // ExpertLayer::load_expert, and kUnsupported where the resident format cannot hold the source
  // exactly.
  Status load(const FfnSpec& spec, uint32_t local_expert_id, const ExpertWeights& weights,
              YieldingProgress& progress);

  // As ExpertLayer has them. With layout `mapped` there is no form.
  std::optional<PanelForm> form() const;
  Status map(uint32_t local_expert_id, std::span<const std::byte> panels,
             uint64_t content_checksum);

  // The checksum of an expert as ExpertLayer has it: empty while the expert is not loaded, and
  // always with layout `mapped`, where a ContentReader takes it instead.
  std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const;
  bool is_loaded(uint32_t local_expert_id) const { return experts_[local_expert_id].is_loaded; }
  uint32_t num_local_experts() const { return static_cast<uint32_t>(experts_.size()); }
  ResidentFormats formats() const { return formats_; }
  uint64_t resident_bytes() const;
  // As ExpertLayer has it: empty for an expert that is not loaded, and with layout `mapped`.
  std::array<std::span<const std::byte>, 3> resident_pieces(uint32_t local_expert_id) const;

  // Matrices of the first projection: 2 for gate and up, or 1 for up alone.
  uint32_t num_matrices() const { return num_matrices_; }
  uint32_t num_intermediate_panels() const { return num_intermediate_panels_; }  // of one matrix
  uint32_t num_out_panels() const { return num_out_panels_; }
  size_t gate_up_panel_bytes() const { return gate_up_panel_bytes_; }
  size_t down_panel_bytes() const { return down_panel_bytes_; }

  bool is_mapped() const { return layout_ == WeightsLayout::kMapped; }
  // The panels that gate_up() and down() name, under either layout. With `mapped`, `scratch` holds
  // them until its next use. Errors, with `mapped` only: kCheckpoint naming the file, kOutOfMemory.
  Result<PanelRun> read_gate_up(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels,
                                PanelScratch& scratch) const;
  Result<PanelRun> read_down(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels,
                             PanelScratch& scratch) const;

  // With layout `packed` only: the panels of intermediate or output columns
  // [first_panel, first_panel + num_panels) * panel_width. With a gate, gate_up has twice as many.
  PanelRun gate_up(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels) const;
  PanelRun down(uint32_t local_expert_id, uint32_t first_panel, uint32_t num_panels) const;

 private:
  // Biases are in the order of panels and padded with zeros; empty if there are none.
  struct Expert {
    bool is_loaded = false;
    // These refer to memory of this object's own, or to a mapped file. Panels are null with layout
    // `mapped`.
    const std::byte* panels = nullptr;
    std::span<const float> gate_up_bias, down_bias;
    std::vector<float> own_gate_up_bias, own_down_bias;
    MatrixView gate, up, down;  // with layout `mapped`
    uint64_t checksum = 0;      // with layout `packed`
  };

  void set_sizes(const FfnSpec& spec, ResidentFormats formats, uint32_t panel_width);
  Status pack_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                     YieldingProgress& progress);
  std::vector<float> pack_gate_up_bias(const ExpertWeights& weights) const;
  std::byte* own_panels(uint32_t local_expert_id) const {
    return panels_.data() + local_expert_id * expert_bytes_;
  }

  ResidentFormats formats_;
  WeightsLayout layout_ = WeightsLayout::kPacked;
  MatrixPacker packer_;
  uint32_t panel_width_ = 0;
  bool has_bf16_pairs_ = false;
  uint32_t num_matrices_ = 0;
  uint32_t num_intermediate_panels_ = 0;
  uint32_t num_out_panels_ = 0;
  uint32_t in_size_ = 0;
  uint32_t intermediate_size_ = 0;
  size_t gate_up_panel_bytes_ = 0;
  size_t down_panel_bytes_ = 0;
  size_t expert_bytes_ = 0;
  size_t num_gate_up_bias_ = 0;  // floats of an expert, padding included; 0 where it has none
  size_t num_down_bias_ = 0;
  // [num_local_experts] of expert_bytes_ each. Only those of experts that were loaded are touched.
  PageBuffer panels_;
  std::vector<Expert> experts_;
};

}  // namespace dflash::compute

// One layer's experts on the CPU: it groups rows by expert, runs both phases and writes the reply.
// All instruction sets share it; a KernelSet does the arithmetic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/expert_groups.h"
#include "compute/cpu/kernel_set.h"
#include "compute/cpu/packed_experts.h"
#include "compute/cpu/page_buffer.h"
#include "compute/cpu/thread_pool.h"
#include "compute/experts/expert_layer.h"

namespace dflash::compute {

// Loads and forwards follow ExpertLayer's rules; the thread that calls forward() also computes.
class CpuLayer final : public ExpertLayer {
 public:
  // `kernels` and `pool` must outlive the layer.
  CpuLayer(const FfnSpec& spec, PackedExperts experts, const KernelSet& kernels, ThreadPool& pool);

  const FfnSpec& spec() const override { return spec_; }
  uint32_t num_local_experts() const override { return experts_.num_local_experts(); }
  uint64_t resident_bytes() const override { return experts_.resident_bytes(); }
  Status load_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                     YieldingProgress& progress) override;
  std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const override {
    return experts_.content_checksum(local_expert_id);
  }
  Status forward(const ForwardArgs& args, YieldingProgress& progress) override;
  std::array<std::span<const std::byte>, 3> resident_pieces(
      uint32_t local_expert_id) const override {
    return experts_.resident_pieces(local_expert_id);
  }

 private:
  // A run of rows whose intermediate values fit the bound of the scratch.
  struct Portion {
    uint32_t first_row;
    uint32_t num_rows;
    uint32_t first_pair;
    uint32_t num_pairs;
  };

  // The rows of the next portion, at least one; a pair is one (row, expert) of the routing.
  Portion next_portion(const ForwardArgs& args, uint32_t first_row, uint32_t first_pair) const;
  Status forward_portion(const ForwardArgs& args, const Portion& portion,
                         YieldingProgress& progress);
  // Places the arrays of a portion in the scratch. Errors: kOutOfMemory.
  Status place_scratch(const Portion& portion);
  // Widens the rows to float32, and encodes them where the kernels want that.
  void widen_rows(const ForwardArgs& args, const Portion& portion);
  Status run_gate_up(YieldingProgress& progress);
  // Encodes what gate_up has left as float32.
  void encode_intermediate(const Portion& portion, YieldingProgress& progress);
  // Sums over experts and writes the reply. Returns whether every value fits the reply's dtype.
  Result<bool> run_down(const ForwardArgs& args, const Portion& portion,
                        YieldingProgress& progress);
  // Converts the sums of some columns to the reply; returns whether all values fit.
  bool finish_columns(const ForwardArgs& args, const Portion& portion, uint32_t first_panel,
                      uint32_t num_panels);
  // The error that names the first value outside the reply's range, by row and column.
  Error first_range_error(const ForwardArgs& args, const Portion& portion) const;
  uint32_t gate_up_panels_per_task() const;
  uint32_t down_panels_per_task() const;

  const FfnSpec spec_;
  PackedExperts experts_;
  const KernelSet& kernels_;
  ThreadPool& pool_;
  ExpertGroups groups_;
  // Scratch that grows and is used again by later forwards. Strides are odd multiples of a cache
  // line, so that rows do not share cache sets.
  PageBuffer scratch_;
  size_t row_stride_;                   // floats
  size_t encoded_row_stride_;           // bytes; 0 where rows stay float32
  size_t encoded_intermediate_stride_;  // bytes; 0 also where gate_up encodes
  size_t intermediate_value_bytes_;     // of one value that gate_up writes
  size_t intermediate_stride_;          // bytes
  float* rows_ = nullptr;               // [portion rows, row_stride_], the batch widened once
  std::byte* intermediate_ = nullptr;   // [portion pairs, intermediate_stride_], grouped
  // Each task of output columns has [portion rows, task columns], at first column * portion rows.
  float* sums_ = nullptr;
  std::byte* encoded_rows_ = nullptr;  // [portion rows, encoded_row_stride_]
  // [portion pairs, encoded_intermediate_stride_], grouped by expert.
  std::byte* encoded_intermediate_ = nullptr;
  std::vector<PanelScratch> panel_scratch_;    // [pool threads]
  std::vector<const void*> pair_rows_;         // [portion pairs], grouped: what gate and up read
  std::vector<const void*> pair_inputs_;       // [portion pairs], grouped: what down reads
  std::vector<std::byte*> pair_intermediate_;  // [portion pairs], grouped: into intermediate_
};

}  // namespace dflash::compute

// One layer's experts on the CPU: it groups rows by expert, runs both phases and writes the reply.
// All instruction sets share it; a KernelSet does the arithmetic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/expert_groups.h"
#include "compute/cpu/kernel_set.h"
#include "compute/cpu/packed_experts.h"
#include "compute/cpu/scratch_pool.h"
#include "compute/cpu/thread_pool.h"
#include "compute/experts/expert_layer.h"

namespace dflash::compute {

// What one forward writes on its way to the reply, in one block: the arrays of a portion of its
// rows follow each other there. Strides are odd multiples of a cache line, so that rows do not
// share cache sets. It is lent for one forward and then serves another, of any layer.
struct ForwardScratch {
  ScratchBlock block;
  ExpertGroups groups;
  float* rows = nullptr;              // [portion rows, row stride], the batch widened once
  std::byte* intermediate = nullptr;  // [portion pairs, intermediate stride], grouped by expert
  // Each task of output columns has [portion rows, task columns], at first column * portion rows.
  float* sums = nullptr;
  std::byte* encoded_rows = nullptr;          // [portion rows, encoded row stride]
  std::byte* encoded_intermediate = nullptr;  // [portion pairs, its stride], grouped
  std::vector<const void*> pair_rows;         // [portion pairs], grouped: what gate and up read
  std::vector<const void*> pair_inputs;       // [portion pairs], grouped: what down reads
  std::vector<std::byte*> pair_intermediate;  // [portion pairs], grouped: into `intermediate`
  std::vector<uint32_t> order;                // [groups], in which gate and up take them
  std::vector<PanelScratch> panels;           // [pool threads], where weights are only mapped

  size_t num_bytes() const;
};

// Loads and forwards follow ExpertLayer's rules; the thread that calls forward() also computes.
class CpuLayer final : public ExpertLayer {
 public:
  // `kernels`, `pool` and `scratch`, from which each forward borrows, must outlive the layer.
  CpuLayer(const FfnSpec& spec, PackedExperts experts, const KernelSet& kernels, ThreadPool& pool,
           ScratchPool<ForwardScratch>& scratch);

  const FfnSpec& spec() const override { return spec_; }
  uint32_t num_local_experts() const override { return experts_.num_local_experts(); }
  uint64_t resident_bytes() const override { return experts_.resident_bytes(); }
  Status load_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                     YieldingProgress& progress) override;
  std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const override {
    return experts_.content_checksum(local_expert_id);
  }
  std::optional<PanelForm> panel_form() const override { return experts_.form(); }
  Status map_expert(uint32_t local_expert_id, std::span<const std::byte> panels,
                    uint64_t content_checksum) override {
    return experts_.map(local_expert_id, panels, content_checksum);
  }
  Status forward(const ForwardArgs& args, YieldingProgress& progress) override;
  std::array<std::span<const std::byte>, 3> resident_pieces(
      uint32_t local_expert_id) const override {
    return experts_.resident_pieces(local_expert_id);
  }

 private:
  // A run of rows whose arrays fit the bound of the scratch.
  struct Portion {
    uint32_t first_row;
    uint32_t num_rows;
    uint32_t first_pair;
    uint32_t num_pairs;
  };
  // A portion under way.
  struct Run {
    const ForwardArgs& args;
    const Portion& portion;
    ForwardScratch& scratch;
    YieldingProgress& progress;

    const std::vector<ExpertGroup>& groups() const { return scratch.groups.groups(); }
  };

  // The rows of the next portion, at least one; a pair is one (row, expert) of the routing.
  Portion next_portion(const ForwardArgs& args, uint32_t first_row, uint32_t first_pair) const;
  Status forward_portion(const Run& run) const;
  // Places the arrays of a portion in the scratch. Errors: kOutOfMemory.
  Status place_scratch(const Run& run) const;
  // Widens the rows to float32, and encodes them where the kernels want that.
  void widen_rows(const Run& run) const;
  // Puts the experts first that are in memory; the others come in the order of their ids.
  void order_groups(const Run& run) const;
  Status run_gate_up(const Run& run) const;
  // Encodes what gate_up has left as float32.
  void encode_intermediate(const Run& run) const;
  // Sums over experts and writes the reply. Returns whether every value fits the reply's dtype.
  Result<bool> run_down(const Run& run) const;
  // Converts the sums of some columns to the reply; returns whether all values fit.
  bool finish_columns(const Run& run, uint32_t first_panel, uint32_t num_panels) const;
  // The error that names the first value outside the reply's range, by row and column.
  Error first_range_error(const Run& run) const;
  // What the tasks of the two projections read first.
  FirstReads gate_up_first(const ExpertGroups& groups) const;
  FirstReads down_first(const ExpertGroups& groups) const;
  uint32_t gate_up_panels_per_task(const ExpertGroups& groups) const;
  uint32_t down_panels_per_task(const ExpertGroups& groups) const;
  // Bytes of the scratch for each row and for each pair of a portion.
  size_t bytes_per_row() const;
  size_t bytes_per_pair() const { return intermediate_stride_ + encoded_intermediate_stride_; }

  const FfnSpec spec_;
  PackedExperts experts_;
  const KernelSet& kernels_;
  ThreadPool& pool_;
  ScratchPool<ForwardScratch>& scratch_;
  size_t row_stride_;                   // floats
  size_t encoded_row_stride_;           // bytes; 0 where rows stay float32
  size_t encoded_intermediate_stride_;  // bytes; 0 also where gate_up encodes
  size_t intermediate_value_bytes_;     // of one value that gate_up writes
  size_t intermediate_stride_;          // bytes
};

}  // namespace dflash::compute

// The kernel of gate, up and down for experts with few rows. A block computes 32 outputs, one per
// lane, for up to four slots. Its sub-groups work on chains of 256 inputs side by side, one each.
// The chain sums are then added in ascending order, so that the split of the inputs among
// sub-groups changes no bit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/project.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kFewThreads = 256;  // per block at most; a multiple of 64
inline constexpr uint32_t kFewSubgroups = kFewThreads / kSubgroupLanes;

struct FewSums {
  // [matrix, sub-group, slot, output]
  SharedArray<float, 2 * kFewSubgroups * kFewTileRows * kPanelWidth> chains;
  // [matrix, slot, output]
  SharedArray<float, 2 * kFewTileRows * kPanelWidth> totals;
  // The next two lie here so that no register keeps them during the products.
  SharedArray<Tile, 1> tile;
  // Slots that do not exist read the last row again.
  SharedArray<uint32_t, kFewTileRows> rows;

  GPU_FN float& chain(uint32_t matrix, uint32_t subgroup, uint32_t slot) {
    return chains.at(((matrix * kFewSubgroups + subgroup) * kFewTileRows + slot) * kPanelWidth +
                     lane_index());
  }
  GPU_FN float& total(uint32_t matrix, uint32_t slot) {
    return totals.at((matrix * kFewTileRows + slot) * kPanelWidth + lane_index());
  }
};

// Fills in the block's tile and the rows it reads, for what follows.
GPU_FN void share_tile(const ProjectionParams& params, FewSums& shared) {
  if (thread_index() < kFewTileRows) {
    const Tile tile = params.tiles[block_y()];
    if (thread_index() == 0) shared.tile.at(0) = tile;
    shared.rows.at(thread_index()) =
        row_of(params, tile.first_slot + smaller(thread_index(), tile.num_slots - 1));
  }
  sync_block();
}

// Continues kRows chains by eight inputs, or by fewer where the row ends. An input that does not
// exist must not enter a chain as 0 * 0, because -0 + 0 * 0 is +0. Rows are padded to 16 bytes, so
// that they can be loaded whole.
template <uint32_t kRows, bool kIsWhole>
GPU_FN void octet_sums(const float* weights, const float* const* rows, uint32_t begin,
                       uint32_t count, float* sums) {
  GPU_UNROLL
  for (uint32_t i = 0; i < kOctet; i += 4) {
    if (!kIsWhole && begin + i >= count) return;
    GPU_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      const Float4 inputs = load_device_16<Float4>(rows[r] + begin + i);
      GPU_UNROLL
      for (uint32_t j = 0; j < 4; ++j) {
        const float sum = fused(weights[i + j], inputs.values[j], sums[r]);
        sums[r] = kIsWhole || begin + i + j < count ? sum : sums[r];
      }
    }
  }
}

// How many groups of weights a thread loads ahead. It has 128 registers, because two blocks share a
// multiprocessor. A card of 4.3 TB/s and 132 multiprocessors, whose memory answers after a
// microsecond, needs 33 KB per multiprocessor on their way, which is 64 bytes per thread. With one
// row few registers are needed otherwise, and few blocks are there to share the loading, so more is
// loaded ahead; with four rows, and where weights have four bits, decoding and multiplying bound
// the rate before memory does.
DFLASH_GPU_BOTH constexpr uint32_t few_ahead(WeightFormat format, uint32_t num_rows) {
  return num_rows == 1 ? groups_ahead(format, 40, 3) : groups_ahead(format, 32, 3);
}

// Computes one chain of one output for kRows rows.
template <WeightFormat kFormat, uint32_t kRows>
GPU_FN void chain_sums(const Record& record, const float* const* rows, uint32_t count,
                       float* sums) {
  constexpr uint32_t kAhead = few_ahead(kFormat, kRows);
  const uint32_t num_groups = (count + kGroup - 1) / kGroup;
  GPU_UNROLL
  for (uint32_t r = 0; r < kRows; ++r) sums[r] = 0.0f;
  StoredGroup<kFormat> ahead[kAhead] = {};
  GPU_UNROLL
  for (uint32_t i = 0; i < kAhead; ++i) {
    if (i < num_groups) ahead[i] = load_group<kFormat>(record, i);
  }
  for (uint32_t first = 0; first < num_groups; first += kAhead) {
    GPU_UNROLL
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t group = first + i;
      if (group >= num_groups) break;
      const GroupScale scale = group_scale<kFormat>(ahead[i], group);
      const bool is_whole = (group + 1) * kGroup <= count;
      GPU_UNROLL
      // The branch in each turn keeps the compiler from loading all rows at once and spilling.
      for (uint32_t octet = 0; octet < kGroupOctets; ++octet) {
        float weights[kOctet];
        decode_octet<kFormat>(ahead[i], scale, group, octet, weights);
        const uint32_t begin = group * kGroup + octet * kOctet;
        if (is_whole)
          octet_sums<kRows, true>(weights, rows, begin, count, sums);
        else
          octet_sums<kRows, false>(weights, rows, begin, count, sums);
      }
      if (group + kAhead < num_groups) ahead[i] = load_group<kFormat>(record, group + kAhead);
    }
  }
}

// Computes a chain of one matrix for the tile's rows and leaves the sums in shared memory.
template <WeightFormat kFormat>
GPU_FN void store_chain(const ProjectionParams& params, uint32_t chain, uint32_t matrix,
                        uint64_t panels, FewSums& shared) {
  const unsigned char* panel =
      panel_of<kFormat>(params, shared.tile.at(0).expert, panels, block_x());
  const Record record{panel + chain * chain_bytes(kFormat) + lane_index() * kUnitBytes};
  const float* rows[kFewTileRows];
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r)
    rows[r] = params.inputs + uint64_t{shared.rows.at(r)} * params.input_stride + chain * kChain;
  const uint32_t count = smaller(kChain, params.num_inputs - chain * kChain);
  float sums[kFewTileRows] = {};
  if (shared.tile.at(0).num_slots == 1)
    chain_sums<kFormat, 1>(record, rows, count, sums);
  else
    chain_sums<kFormat, kFewTileRows>(record, rows, count, sums);
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r) shared.chain(matrix, subgroup_index(), r) = sums[r];
}

// Adds the first `present` chain sums of the round to the totals, in ascending order. A sub-group
// owns every num_subgroups-th slot, here and where the totals are written out.
GPU_FN void add_chains(uint32_t matrix, uint32_t present, bool is_first, uint32_t num_slots,
                       FewSums& shared) {
  for (uint32_t slot = subgroup_index(); slot < num_slots;
       slot += block_threads() / kSubgroupLanes) {
    float total = is_first ? shared.chain(matrix, 0, slot)
                           : add(shared.total(matrix, slot), shared.chain(matrix, 0, slot));
    for (uint32_t c = 1; c < present; ++c) total = add(total, shared.chain(matrix, c, slot));
    shared.total(matrix, slot) = total;
  }
}

// Computes the tile's outputs. `store(chain, matrix, panels)` leaves the sums of one chain of a
// matrix in shared memory; `panels` is the matrix's offset inside the expert.
template <class StoreChain>
GPU_FN void few_outputs(const ProjectionParams& params, FewSums& shared, const StoreChain& store) {
  share_tile(params, shared);
  const uint32_t num_matrices = is_gated(params) ? 2 : 1;
  const uint32_t num_subgroups = block_threads() / kSubgroupLanes,
                 chains = num_chains(params.num_inputs);
  for (uint32_t first = 0; first < chains; first += num_subgroups) {
    const uint32_t chain = first + subgroup_index();
    for (uint32_t matrix = 0; matrix < num_matrices; ++matrix) {
      if (chain >= chains) break;
      store(chain, matrix, matrix == 0 ? params.first_panels : params.second_panels);
    }
    sync_block();
    const uint32_t num_slots = shared.tile.at(0).num_slots;
    for (uint32_t matrix = 0; matrix < num_matrices; ++matrix) {
      add_chains(matrix, smaller(num_subgroups, chains - first), first == 0, num_slots, shared);
    }
    sync_block();
  }
  const Tile tile = shared.tile.at(0);
  for (uint32_t slot = subgroup_index(); slot < tile.num_slots; slot += num_subgroups) {
    finish_output(params, tile.expert, tile.first_slot + slot,
                  block_x() * kPanelWidth + lane_index(), shared.total(0, slot),
                  num_matrices == 2 ? shared.total(1, slot) : 0.0f);
  }
}

template <WeightFormat kFormat>
GPU_FN void project_few(const ProjectionParams& params) {
  GPU_SHARED(FewSums, shared);
  if (block_y() >= *params.num_tiles) return;  // the whole block
  few_outputs(params, shared, [&](uint32_t chain, uint32_t matrix, uint64_t panels) {
    store_chain<kFormat>(params, chain, matrix, panels, shared);
  });
}

}  // namespace dflash::compute::gpu

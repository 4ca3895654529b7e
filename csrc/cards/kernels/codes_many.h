// The many-row kernels of the classes that multiply codes: a grouped GEMM. A block computes 64
// slots x 64 outputs (the panels of project_many.h) from codes and scales in shared memory, a few
// groups of 32 inputs per step. What differs between the classes is a template argument, `Codes`
// (int8_many.h, dot2_many.h), which has
//
// - Tiles: what a block shares. It has `factors` (GroupFactors), the codes, and `sums`, which take
//   the place of the codes at the end.
// - kStepGroups: the groups of a step. Record: a row's records.
// - Ahead<kFormat>: how a step's codes come into shared memory. It is FilledAtOnce, or a type that
//   loads them a step before.
// - Group, read<kFormat>(record, index, group), put_weights(tiles, group, column, words) and
//   put_row(tiles, group, slot, record, index), for FilledAtOnce: a group of weights, how it is
//   read, and how codes are stored to shared memory.
// - dots<kFormat, Owned, kPart>(tiles, group, dots): the dot products of a group, or of its half
//   kPart where scales are per 16 inputs.
//
// A type `Owned` says which kRows x kColumns sums a thread has: those of row(i) and column(j). The
// float32 steps after the dot products are the same in all classes and on all cards.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/int8_codes.h"
#include "cards/kernels/project_many.h"

namespace dflash::compute::gpu {

// Where has_half_offsets(), a group has two row sums and two offsets, otherwise one.
template <uint32_t kStepGroups, uint32_t kOffsets>
struct GroupFactors {
  SharedArray<float, kStepGroups * kManyTileRows> row_scales, row_sums[kOffsets];  // [group, slot]
  // [part][group, output]
  SharedArray<float, kStepGroups * kManyOutputs> scales[2], offsets[kOffsets];
};
DFLASH_GPU_BOTH constexpr uint32_t offset_parts(WeightFormat format) {
  return has_half_offsets(format) ? 2 : 1;
}

// Thread t: output t % 64, every second group of the step.
template <class Codes, WeightFormat kFormat>
GPU_FN void fill_weight_codes(const unsigned char* panel, uint32_t begin, uint32_t num_groups,
                              typename Codes::Tiles& tiles) {
  const uint32_t column = thread_index() % kManyOutputs;
  GPU_UNROLL
  for (uint32_t i = 0; i < Codes::kStepGroups / 2; ++i) {
    const uint32_t group = thread_index() / kManyOutputs + 2 * i;
    if (group >= num_groups) return;
    typename Codes::Group weights{};
    if (panel != nullptr) {
      const Record record{panel + begin / kChain * chain_bytes(kFormat) +
                          column % kPanelWidth * kUnitBytes};
      Codes::template read<kFormat>(record, begin % kChain / kGroup + group, weights);
    }
    Codes::put_weights(tiles, group, column, weights.words);
    GPU_UNROLL
    for (uint32_t p = 0; p < group_parts(kFormat); ++p) {
      tiles.factors.scales[p].at(group * kManyOutputs + column) = weights.scales[p];
      if constexpr (has_offset(kFormat))
        tiles.factors.offsets[p].at(group * kManyOutputs + column) = weights.offsets[p];
    }
  }
}

// Thread t: slot t % 64, every second group of the step.
template <class Codes, WeightFormat kFormat>
GPU_FN void fill_row_codes(const typename Codes::Record& row, uint32_t begin, uint32_t num_groups,
                           typename Codes::Tiles& tiles) {
  const uint32_t slot = thread_index() % kManyTileRows;
  const typename Codes::Record record{row.records,
                                      row.unit + begin / kChain * Codes::Record::kRecordUnits};
  GPU_UNROLL
  for (uint32_t i = 0; i < Codes::kStepGroups / 2; ++i) {
    const uint32_t group = thread_index() / kManyTileRows + 2 * i,
                   index = begin % kChain / kGroup + group;
    if (group >= num_groups) return;
    Codes::put_row(tiles, group, slot, record, index);
    tiles.factors.row_scales.at(group * kManyTileRows + slot) = record.scale(index);
    if constexpr (has_half_offsets(kFormat)) {
      float sums[2];
      scaled_half_sums(record, index, sums);
      tiles.factors.row_sums[0].at(group * kManyTileRows + slot) = sums[0];
      tiles.factors.row_sums[1].at(group * kManyTileRows + slot) = sums[1];
    } else if constexpr (has_offset(kFormat)) {
      tiles.factors.row_sums[0].at(group * kManyTileRows + slot) = record.scaled_sum(index);
    }
  }
}

// Loads a step's codes only when they are stored. While a block waits for them, the other blocks of
// the multiprocessor have to keep it busy.
template <class Codes, WeightFormat kFormat>
struct FilledAtOnce {
  GPU_FN void fetch(const unsigned char*, const typename Codes::Record&, uint32_t, uint32_t) {}
  GPU_FN void store(const unsigned char* panel, const typename Codes::Record& row, uint32_t begin,
                    uint32_t num_groups, typename Codes::Tiles& tiles) const {
    fill_weight_codes<Codes, kFormat>(panel, begin, num_groups, tiles);
    fill_row_codes<Codes, kFormat>(row, begin, num_groups, tiles);
  }
};

// Continues the chains by one group, or by its half `kPart` where scales are per 16 inputs.
template <class Codes, WeightFormat kFormat, class Owned, uint32_t kPart>
GPU_FN void group_part(uint32_t group, typename Codes::Tiles& tiles,
                       float (*sums)[Owned::kColumns]) {
  float dots[Owned::kRows][Owned::kColumns];
  Codes::template dots<kFormat, Owned, kPart>(tiles, group, dots);
  float scales[Owned::kColumns];
  GPU_UNROLL
  for (uint32_t j = 0; j < Owned::kColumns; ++j)
    scales[j] = tiles.factors.scales[kPart].at(group * kManyOutputs + Owned::column(j));
  GPU_UNROLL
  for (uint32_t i = 0; i < Owned::kRows; ++i) {
    const float row_scale = tiles.factors.row_scales.at(group * kManyTileRows + Owned::row(i));
    GPU_UNROLL
    for (uint32_t j = 0; j < Owned::kColumns; ++j)
      sums[i][j] = fused(dots[i][j], mul(scales[j], row_scale), sums[i][j]);
  }
}

template <class Owned, uint32_t kPart, class Factors>
GPU_FN void group_offsets(uint32_t group, Factors& factors, float (*sums)[Owned::kColumns]) {
  float offsets[Owned::kColumns];
  GPU_UNROLL
  for (uint32_t j = 0; j < Owned::kColumns; ++j)
    offsets[j] = factors.offsets[kPart].at(group * kManyOutputs + Owned::column(j));
  GPU_UNROLL
  for (uint32_t i = 0; i < Owned::kRows; ++i) {
    const float row_sum = factors.row_sums[kPart].at(group * kManyTileRows + Owned::row(i));
    GPU_UNROLL
    for (uint32_t j = 0; j < Owned::kColumns; ++j)
      sums[i][j] = fused(offsets[j], row_sum, sums[i][j]);
  }
}

// Adds the sums of a chain to the totals and begins the next chain.
template <class Owned>
GPU_FN void end_code_chain(bool is_first, float (*sums)[Owned::kColumns],
                           float (*totals)[Owned::kColumns]) {
  GPU_UNROLL
  for (uint32_t i = 0; i < Owned::kRows; ++i) {
    GPU_UNROLL
    for (uint32_t j = 0; j < Owned::kColumns; ++j) {
      totals[i][j] = is_first ? sums[i][j] : add(totals[i][j], sums[i][j]);
      sums[i][j] = 0.0f;
    }
  }
}

template <class Codes, WeightFormat kFormat, class Owned>
GPU_FN void codes_many(const ProjectionParams& params, const Tile& tile,
                       typename Codes::Tiles& tiles) {
  constexpr uint32_t kStepInputs = Codes::kStepGroups * kGroup;
  static_assert(kChain % kStepInputs == 0);
  const unsigned char* panel = own_panel<kFormat>(params, tile);
  const uint32_t slot =
      tile.first_slot + smaller(thread_index() % kManyTileRows, tile.num_slots - 1);
  const typename Codes::Record row{params.codes, Codes::Record::first_unit(params, slot)};
  float totals[Owned::kRows][Owned::kColumns] = {}, sums[Owned::kRows][Owned::kColumns] = {};
  typename Codes::template Ahead<kFormat> ahead;
  ahead.fetch(panel, row, 0, params.num_inputs);
  for (uint32_t begin = 0; begin < params.num_inputs; begin += kStepInputs) {
    const uint32_t num_groups =
        smaller(Codes::kStepGroups, (params.num_inputs - begin + kGroup - 1) / kGroup);
    ahead.store(panel, row, begin, num_groups, tiles);
    sync_block();
    ahead.fetch(panel, row, begin + kStepInputs, params.num_inputs);
    for (uint32_t group = 0; group < num_groups; ++group) {
      group_part<Codes, kFormat, Owned, 0>(group, tiles, sums);
      if constexpr (has_offset(kFormat)) group_offsets<Owned, 0>(group, tiles.factors, sums);
      if constexpr (group_parts(kFormat) == 2)
        group_part<Codes, kFormat, Owned, 1>(group, tiles, sums);
      if constexpr (has_half_offsets(kFormat)) group_offsets<Owned, 1>(group, tiles.factors, sums);
    }
    const uint32_t end = begin + kStepInputs;
    if (end % kChain == 0 || end >= params.num_inputs)
      end_code_chain<Owned>(end <= kChain, sums, totals);
    sync_block();
  }
  GPU_UNROLL
  for (uint32_t i = 0; i < Owned::kRows; ++i) {
    GPU_UNROLL
    for (uint32_t j = 0; j < Owned::kColumns; ++j)
      tiles.sums.at(Owned::row(i) * kManyOutputs + Owned::column(j)) = totals[i][j];
  }
  sync_block();
  finish_sums(params, tile, tiles.sums);
}

}  // namespace dflash::compute::gpu

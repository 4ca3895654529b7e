// Gate, up and down of class int8-groups for many rows of an expert, a grouped GEMM: a block computes 64 slots x 64 outputs (the panels of
// project_many.h) out of codes and scales in shared memory, four groups of 32 inputs a step. A tile type (int8_tile.h) makes the exact dot
// products, on matrix units where there are any; the float32 steps after them are the same everywhere, and so are the bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/int8_rows.h"
#include "compute/gpu/kernels/int8_tile.h"
#include "compute/gpu/kernels/int8_tile_mfma.h"
#include "compute/gpu/kernels/int8_tile_mma.h"
#include "compute/gpu/kernels/int8_tile_wmma.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kStepGroups = 4;
inline constexpr uint32_t kStepInputs = kStepGroups * kGroup;
static_assert(kChain % kStepInputs == 0);

struct Int8Tiles {
  union {
    SharedArray<uint32_t, 2 * kStepGroups * kTileCodes> codes;  // [rows or weights, group, row or output, word]
    SharedArray<float, kManyTileRows * kManyOutputs> sums;      // at the end
  };
  SharedArray<float, kStepGroups * kManyTileRows> row_scales, row_sums;     // [group, slot]
  SharedArray<float, kStepGroups * kManyOutputs> scales[2], offsets;        // [part][group, output]

  GPU_FN uint32_t* row_codes(uint32_t group) { return &codes.at(group * kTileCodes); }
  GPU_FN uint32_t* weight_codes(uint32_t group) { return &codes.at((kStepGroups + group) * kTileCodes); }
};

GPU_FN void put_words(uint32_t* tile, uint32_t index, const uint32_t* words) {
  GPU_UNROLL
  for (uint32_t half = 0; half < 2; ++half) {
    Unit unit;
    GPU_UNROLL
    for (uint32_t w = 0; w < 4; ++w) unit.words[w] = words[4 * half + w];
    *reinterpret_cast<Unit*>(tile + code_place(index, 4 * half)) = unit;
  }
}

// Thread t: output t % 64, every second group of the step.
template <WeightFormat kFormat>
GPU_FN void fill_weight_codes(const unsigned char* panel, uint32_t begin, uint32_t num_groups, Int8Tiles& tiles) {
  const uint32_t column = thread_index() % kManyOutputs;
  GPU_UNROLL
  for (uint32_t i = 0; i < kStepGroups / 2; ++i) {
    const uint32_t group = thread_index() / kManyOutputs + 2 * i;
    if (group >= num_groups) return;
    Int8Group weights{};
    if (panel != nullptr) {
      const Record record{panel + begin / kChain * chain_bytes(kFormat) + column % kPanelWidth * kUnitBytes};
      read_codes<kFormat>(record, begin % kChain / kGroup + group, weights);
    }
    put_words(tiles.weight_codes(group), column, weights.words);
    GPU_UNROLL
    for (uint32_t p = 0; p < group_parts(kFormat); ++p) tiles.scales[p].at(group * kManyOutputs + column) = weights.scales[p];
    if constexpr (has_offset(kFormat)) tiles.offsets.at(group * kManyOutputs + column) = weights.offset;
  }
}

// Thread t: slot t % 64, every second group of the step.
template <WeightFormat kFormat>
GPU_FN void fill_row_codes(const Int8Record& row, uint32_t begin, uint32_t num_groups, Int8Tiles& tiles) {
  const uint32_t slot = thread_index() % kManyTileRows;
  const Int8Record record{row.records, row.unit + begin / kChain * kInt8RecordUnits};
  GPU_UNROLL
  for (uint32_t i = 0; i < kStepGroups / 2; ++i) {
    const uint32_t group = thread_index() / kManyTileRows + 2 * i, index = begin % kChain / kGroup + group;
    if (group >= num_groups) return;
    uint32_t* const tile = tiles.row_codes(group);
    *reinterpret_cast<Unit*>(tile + code_place(slot, 0)) = load_16<Unit>(record.codes(index));
    *reinterpret_cast<Unit*>(tile + code_place(slot, 4)) = load_16<Unit>(record.codes(index) + kUnitBytes);
    tiles.row_scales.at(group * kManyTileRows + slot) = record.scale(index);
    if constexpr (has_offset(kFormat)) tiles.row_sums.at(group * kManyTileRows + slot) = record.scaled_sum(index);
  }
}

// One group, or its half `kPart` where scales are per 16 inputs, onto the chains.
template <WeightFormat kFormat, class Owned, uint32_t kPart>
GPU_FN void group_part(uint32_t group, Int8Tiles& tiles, float (*sums)[Owned::kColumns]) {
  constexpr uint32_t kWords = kGroupWords / group_parts(kFormat);
  int32_t dots[Owned::kRows][Owned::kColumns];  // from the bits of 1.5 * 2^23, so that a subtraction makes them floats: they are below 2^20
  GPU_UNROLL
  for (uint32_t i = 0; i < Owned::kRows; ++i) {
    GPU_UNROLL
    for (uint32_t j = 0; j < Owned::kColumns; ++j) dots[i][j] = kIntegerShiftBits;
  }
  Owned::template multiply<kPart * kWords, kWords>(tiles.row_codes(group), tiles.weight_codes(group), dots);
  float scales[Owned::kColumns];
  GPU_UNROLL
  for (uint32_t j = 0; j < Owned::kColumns; ++j) scales[j] = tiles.scales[kPart].at(group * kManyOutputs + Owned::column(j));
  GPU_UNROLL
  for (uint32_t i = 0; i < Owned::kRows; ++i) {
    const float row_scale = tiles.row_scales.at(group * kManyTileRows + Owned::row(i));
    GPU_UNROLL
    for (uint32_t j = 0; j < Owned::kColumns; ++j) {
      const float dot = sub(float_of(static_cast<uint32_t>(dots[i][j])), kIntegerShift);
      sums[i][j] = fused(dot, mul(scales[j], row_scale), sums[i][j]);
    }
  }
}

template <class Owned>
GPU_FN void group_offsets(uint32_t group, Int8Tiles& tiles, float (*sums)[Owned::kColumns]) {
  float offsets[Owned::kColumns];
  GPU_UNROLL
  for (uint32_t j = 0; j < Owned::kColumns; ++j) offsets[j] = tiles.offsets.at(group * kManyOutputs + Owned::column(j));
  GPU_UNROLL
  for (uint32_t i = 0; i < Owned::kRows; ++i) {
    const float row_sum = tiles.row_sums.at(group * kManyTileRows + Owned::row(i));
    GPU_UNROLL
    for (uint32_t j = 0; j < Owned::kColumns; ++j) sums[i][j] = fused(offsets[j], row_sum, sums[i][j]);
  }
}

template <WeightFormat kFormat, class Owned>
GPU_FN void int8_many_with(const ProjectionParams& params, const Tile& tile, Int8Tiles& tiles) {
  const unsigned char* panel = own_panel<kFormat>(params, tile);
  const Int8Record row{params.codes, row_unit(params, tile.first_slot + smaller(thread_index() % kManyTileRows, tile.num_slots - 1))};
  float totals[Owned::kRows][Owned::kColumns] = {}, sums[Owned::kRows][Owned::kColumns] = {};
  for (uint32_t begin = 0; begin < params.num_inputs; begin += kStepInputs) {
    const uint32_t num_groups = smaller(kStepGroups, (params.num_inputs - begin + kGroup - 1) / kGroup);
    fill_weight_codes<kFormat>(panel, begin, num_groups, tiles);
    fill_row_codes<kFormat>(row, begin, num_groups, tiles);
    sync_block();
    for (uint32_t group = 0; group < num_groups; ++group) {
      group_part<kFormat, Owned, 0>(group, tiles, sums);
      if constexpr (group_parts(kFormat) == 2) group_part<kFormat, Owned, 1>(group, tiles, sums);
      if constexpr (has_offset(kFormat)) group_offsets<Owned>(group, tiles, sums);
    }
    const uint32_t end = begin + kStepInputs;
    if (end % kChain == 0 || end >= params.num_inputs) {
      GPU_UNROLL
      for (uint32_t i = 0; i < Owned::kRows; ++i) {
        GPU_UNROLL
        for (uint32_t j = 0; j < Owned::kColumns; ++j) {
          totals[i][j] = end <= kChain ? sums[i][j] : add(totals[i][j], sums[i][j]);
          sums[i][j] = 0.0f;
        }
      }
    }
    sync_block();
  }
  GPU_UNROLL
  for (uint32_t i = 0; i < Owned::kRows; ++i) {
    GPU_UNROLL
    for (uint32_t j = 0; j < Owned::kColumns; ++j) tiles.sums.at(Owned::row(i) * kManyOutputs + Owned::column(j)) = totals[i][j];
  }
  sync_block();
  finish_sums(params, tile, tiles.sums);
}

template <WeightFormat kFormat>
GPU_FN void int8_many(const ProjectionParams& params) {
  GPU_SHARED(Int8Tiles, tiles);
  if (block_y() >= *params.num_tiles) return;  // the whole block
  const Tile tile = params.tiles[block_y()];
#if defined(DFLASH_GPU_SIM)  // every kind of tile is tested
  const bool has_waves_of_32 = sim::thread_place().wave_width == 32;
  if (has_waves_of_32 && params.is_gate_up) return int8_many_with<kFormat, Int8MmaTile>(params, tile, tiles);
  if (has_waves_of_32) return int8_many_with<kFormat, Int8WmmaTile>(params, tile, tiles);
  if (params.is_gate_up) return int8_many_with<kFormat, Int8MfmaTile>(params, tile, tiles);
  int8_many_with<kFormat, Dot4Tile>(params, tile, tiles);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  int8_many_with<kFormat, Int8MmaTile>(params, tile, tiles);
#elif defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__)
  int8_many_with<kFormat, Int8MfmaTile>(params, tile, tiles);
#elif defined(__GFX11__) || defined(__GFX12__)
  int8_many_with<kFormat, Int8WmmaTile>(params, tile, tiles);
#else
  int8_many_with<kFormat, Dot4Tile>(params, tile, tiles);
#endif
}

}  // namespace dflash::compute::gpu

// The kernel of gate, up and down in class f16-dot2 for experts with many rows (codes_many.h), with
// two groups of 32 inputs per step. A group takes 16 dot2 and two float32 steps for 32
// multiply-adds. The 8 x 4 sums of a thread read 12 units of shared memory per 128 dot2, which is
// 3/4 of what a gfx906 can read in that time. The sums, dot products and totals of 32 outputs take
// so many registers that a gfx906 has one wave per SIMD, so latency is hidden by loading ahead and
// not by other waves.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "cards/kernels/codes_many.h"
#include "cards/kernels/dot2_rows.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kCodeUnits = kGroupPairs / 4;  // units of a group's codes

// Unit u of row or output i lies beside those of i - 1 and i + 1, so that neighbouring threads
// store and read neighbouring units, each from another bank.
template <uint32_t kOffsets>
struct HalfTiles {
  static constexpr uint32_t kSteps = 2, kUnits = kCodeUnits;
  union {
    // [rows or weights, group, unit, row or output]
    SharedArray<Unit, 2 * kSteps * kUnits * kManyOutputs> units;
    SharedArray<float, kManyTileRows * kManyOutputs> sums;  // in the codes' place at the end
  };
  GroupFactors<kSteps, kOffsets> factors;

  GPU_FN Unit& row(uint32_t group, uint32_t unit, uint32_t slot) {
    return units.at((group * kUnits + unit) * kManyOutputs + slot);
  }
  GPU_FN Unit& weight(uint32_t group, uint32_t unit, uint32_t column) {
    return row(kSteps + group, unit, column);
  }
};
static_assert(kManyTileRows == kManyOutputs);

// A sub-group has 32 x 32 sums, and a thread every fourth row and every eighth column of these.
struct Dot2Tile {
  static constexpr uint32_t kRows = 8, kColumns = 4;
  GPU_FN static uint32_t row(uint32_t i) {
    return subgroup_index() / 2 * 32 + i * 4 + lane_index() / 8;
  }
  GPU_FN static uint32_t column(uint32_t j) {
    return subgroup_index() % 2 * 32 + j * 8 + lane_index() % 8;
  }
};

// Loads a step's codes while the step before is multiplied, and decodes them when they are stored.
// Nibbles are an exception, because they are few bytes and take too many registers to decode; so
// are formats with an offset for each half of a group. Thread t has output t % 64 and slot t % 64
// of group t / 64.
template <class Codes, WeightFormat kFormat>
struct FetchedAhead {
  StoredGroup<kFormat> weights;
  Unit codes[kCodeUnits];
  float row_scale, row_sum;

  GPU_FN void fetch(const unsigned char* panel, const HalfRecord& row, uint32_t begin,
                    uint32_t num_inputs) {
    const uint32_t column = thread_index() % kManyOutputs,
                   input = begin + thread_index() / kManyOutputs * kGroup;
    if (input >= num_inputs) return;
    const uint32_t chain = input / kChain, index = input % kChain / kGroup;
    const Record record{panel + chain * chain_bytes(kFormat) + column % kPanelWidth * kUnitBytes};
    if (panel == nullptr)
      weights = {};
    else
      weights = load_group<kFormat>(record, index);
    const HalfRecord from{row.records, row.unit + chain * HalfRecord::kRecordUnits};
    GPU_UNROLL
    for (uint32_t u = 0; u < kCodeUnits; ++u)
      codes[u] = load_device_16<Unit>(from.codes(index) + u * kUnitBytes);
    row_scale = from.scale(index);
    if constexpr (has_offset(kFormat)) row_sum = from.scaled_sum(index);
  }

  GPU_FN void store(const unsigned char*, const HalfRecord&, uint32_t begin, uint32_t num_groups,
                    typename Codes::Tiles& tiles) const {
    const uint32_t group = thread_index() / kManyOutputs, place = thread_index() % kManyOutputs;
    if (group >= num_groups) return;
    const HalfGroup found = half_group<kFormat>(weights, begin % kChain / kGroup + group);
    Codes::put_weights(tiles, group, place, found.words);
    GPU_UNROLL
    for (uint32_t p = 0; p < group_parts(kFormat); ++p)
      tiles.factors.scales[p].at(group * kManyOutputs + place) = found.scales[p];
    GPU_UNROLL
    for (uint32_t u = 0; u < kCodeUnits; ++u) tiles.row(group, u, place) = codes[u];
    tiles.factors.row_scales.at(group * kManyTileRows + place) = row_scale;
    if constexpr (!has_offset(kFormat)) return;
    tiles.factors.offsets[0].at(group * kManyOutputs + place) = found.offsets[0];
    tiles.factors.row_sums[0].at(group * kManyTileRows + place) = row_sum;
  }
};

template <uint32_t kOffsets>
struct Dot2Many {
  using Tiles = HalfTiles<kOffsets>;
  using Group = HalfGroup;
  using Record = HalfRecord;
  static constexpr uint32_t kStepGroups = Tiles::kSteps;
  template <WeightFormat kFormat>
  using Ahead =
      std::conditional_t<is_nibbles(kFormat) || kOffsets == 2, FilledAtOnce<Dot2Many, kFormat>,
                         FetchedAhead<Dot2Many, kFormat>>;

  template <WeightFormat kFormat>
  GPU_FN static void read(const gpu::Record& record, uint32_t index, HalfGroup& group) {
    group = half_group<kFormat>(load_group<kFormat>(record, index), index);
  }

  GPU_FN static void put_row(Tiles& tiles, uint32_t group, uint32_t slot, const HalfRecord& record,
                             uint32_t index) {
    GPU_UNROLL
    for (uint32_t u = 0; u < kCodeUnits; ++u)
      tiles.row(group, u, slot) = load_device_16<Unit>(record.codes(index) + u * kUnitBytes);
  }

  GPU_FN static void put_weights(Tiles& tiles, uint32_t group, uint32_t column,
                                 const uint32_t* words) {
    GPU_UNROLL
    for (uint32_t u = 0; u < kCodeUnits; ++u) {
      GPU_UNROLL
      for (uint32_t w = 0; w < 4; ++w) tiles.weight(group, u, column).words[w] = words[4 * u + w];
    }
  }

  template <WeightFormat kFormat, class Owned, uint32_t kPart>
  GPU_FN static void dots(Tiles& tiles, uint32_t group, float (*found)[Owned::kColumns]) {
    constexpr uint32_t kUnits = kCodeUnits / group_parts(kFormat);
    GPU_UNROLL
    for (uint32_t i = 0; i < Owned::kRows; ++i) {
      GPU_UNROLL
      for (uint32_t j = 0; j < Owned::kColumns; ++j) found[i][j] = 0.0f;
    }
    GPU_UNROLL
    for (uint32_t u = kPart * kUnits; u < (kPart + 1) * kUnits; ++u) {
      Unit columns[Owned::kColumns];
      GPU_UNROLL
      for (uint32_t j = 0; j < Owned::kColumns; ++j)
        columns[j] = load_16<Unit>(&tiles.weight(group, u, Owned::column(j)));
      GPU_UNROLL
      for (uint32_t i = 0; i < Owned::kRows; ++i) {
        const Unit codes = load_16<Unit>(&tiles.row(group, u, Owned::row(i)));
        GPU_UNROLL
        for (uint32_t j = 0; j < Owned::kColumns; ++j) {
          GPU_UNROLL
          for (uint32_t w = 0; w < 4; ++w)
            found[i][j] = dot2(codes.words[w], columns[j].words[w], found[i][j]);
        }
      }
    }
  }
};

template <WeightFormat kFormat>
GPU_FN void dot2_many(const ProjectionParams& params) {
  if constexpr (kHasDot2) {
    using Codes = Dot2Many<offset_parts(kFormat)>;
    GPU_SHARED(typename Codes::Tiles, tiles);
    if (block_y() >= *params.num_tiles) return;  // the whole block
    const Tile tile = params.tiles[block_y()];
    codes_many<Codes, kFormat, Dot2Tile>(params, tile, tiles);
  } else {
    stop_kernel();
  }
}

}  // namespace dflash::compute::gpu

// The kernel of gate, up and down in class int8-groups for experts with many rows (codes_many.h),
// with four groups of 32 inputs per step. A tile type (int8_tile.h) computes the exact dot
// products, on matrix units where there are any. The float32 steps after them are the same
// everywhere, and so are the bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/codes_many.h"
#include "cards/kernels/int8_rows.h"
#include "cards/kernels/int8_tile.h"
#include "cards/kernels/int8_tile_mfma.h"
#include "cards/kernels/int8_tile_mma.h"
#include "cards/kernels/int8_tile_wmma.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kInt8StepGroups = 4;

template <uint32_t kOffsets>
struct Int8Tiles {
  union {
    // [rows or weights, group, row or output, word]
    SharedArray<uint32_t, 2 * kInt8StepGroups * kTileCodes> codes;
    SharedArray<float, kManyTileRows * kManyOutputs> sums;  // in the codes' place at the end
  };
  GroupFactors<kInt8StepGroups, kOffsets> factors;

  GPU_FN uint32_t* row_codes(uint32_t group) { return &codes.at(group * kTileCodes); }
  GPU_FN uint32_t* weight_codes(uint32_t group) {
    return &codes.at((kInt8StepGroups + group) * kTileCodes);
  }
};

template <uint32_t kOffsets>
struct Int8Many {
  using Tiles = Int8Tiles<kOffsets>;
  using Group = Int8Group;
  using Record = Int8Record;
  static constexpr uint32_t kStepGroups = kInt8StepGroups;
  template <WeightFormat kFormat>
  using Ahead = FilledAtOnce<Int8Many, kFormat>;

  template <WeightFormat kFormat>
  GPU_FN static void read(const gpu::Record& record, uint32_t index, Int8Group& group) {
    read_codes<kFormat>(record, index, group);
  }

  GPU_FN static void put_weights(Tiles& tiles, uint32_t group, uint32_t column,
                                 const uint32_t* words) {
    GPU_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      Unit unit;
      GPU_UNROLL
      for (uint32_t w = 0; w < 4; ++w) unit.words[w] = words[4 * half + w];
      *reinterpret_cast<Unit*>(tiles.weight_codes(group) + code_place(column, 4 * half)) = unit;
    }
  }

  GPU_FN static void put_row(Tiles& tiles, uint32_t group, uint32_t slot, const Int8Record& record,
                             uint32_t index) {
    uint32_t* const tile = tiles.row_codes(group);
    *reinterpret_cast<Unit*>(tile + code_place(slot, 0)) = load_16<Unit>(record.codes(index));
    *reinterpret_cast<Unit*>(tile + code_place(slot, 4)) =
        load_16<Unit>(record.codes(index) + kUnitBytes);
  }

  template <WeightFormat kFormat, class Owned, uint32_t kPart>
  GPU_FN static void dots(Tiles& tiles, uint32_t group, float (*found)[Owned::kColumns]) {
    constexpr uint32_t kWords = kGroupWords / group_parts(kFormat);
    // The dot products are below 2^20. They start from the bits of 1.5 * 2^23, so that one
    // subtraction makes floats of them.
    int32_t dots[Owned::kRows][Owned::kColumns];
    GPU_UNROLL
    for (uint32_t i = 0; i < Owned::kRows; ++i) {
      GPU_UNROLL
      for (uint32_t j = 0; j < Owned::kColumns; ++j) dots[i][j] = kIntegerShiftBits;
    }
    Owned::template multiply<kPart * kWords, kWords>(tiles.row_codes(group),
                                                     tiles.weight_codes(group), dots);
    GPU_UNROLL
    for (uint32_t i = 0; i < Owned::kRows; ++i) {
      GPU_UNROLL
      for (uint32_t j = 0; j < Owned::kColumns; ++j)
        found[i][j] = sub(float_of(static_cast<uint32_t>(dots[i][j])), kIntegerShift);
    }
  }
};

template <WeightFormat kFormat>
GPU_FN void int8_many(const ProjectionParams& params) {
  using Codes = Int8Many<offset_parts(kFormat)>;
  GPU_SHARED(typename Codes::Tiles, tiles);
  if (block_y() >= *params.num_tiles) return;  // the whole block
  const Tile tile = params.tiles[block_y()];
#if defined(DFLASH_GPU_SIM)  // every kind of tile is tested
  const bool has_waves_of_32 = sim::thread_place().wave_width == 32;
  if (has_waves_of_32 && params.is_gate_up)
    return codes_many<Codes, kFormat, Int8MmaTile>(params, tile, tiles);
  if (has_waves_of_32) return codes_many<Codes, kFormat, Int8WmmaTile>(params, tile, tiles);
  if (params.is_gate_up) return codes_many<Codes, kFormat, Int8MfmaTile>(params, tile, tiles);
  codes_many<Codes, kFormat, Dot4Tile>(params, tile, tiles);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  codes_many<Codes, kFormat, Int8MmaTile>(params, tile, tiles);
#elif defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__)
  codes_many<Codes, kFormat, Int8MfmaTile>(params, tile, tiles);
#elif defined(__GFX11__) || defined(__GFX12__)
  codes_many<Codes, kFormat, Int8WmmaTile>(params, tile, tiles);
#else
  codes_many<Codes, kFormat, Dot4Tile>(params, tile, tiles);
#endif
}

}  // namespace dflash::compute::gpu

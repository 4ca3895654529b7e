// The kernel of the matrix-unit classes for experts with few rows. A block computes two panels of
// 32 outputs for the slots of one tile, at most 16. The teams of the block work on chains of 256
// inputs side by side, one chain each. The sums of the chains are then added in ascending order, as
// the many-row kernel adds them, so that both kernels have the same bits. What bounds the rate is
// the bandwidth at which weights are read from memory, so the weights of the next groups are being
// loaded while a group is multiplied.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/bf16_stage.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kHalfFewThreads = 256;  // per block at most; a multiple of 64
// The registers per panel that a thread spends on groups of weights being loaded. Two blocks of 256
// threads share a multiprocessor, which leaves a thread 128 registers in all. With this share of
// them a thread loads 96 bytes of four-bit codes ahead, or 128 of others; that is 48 or 64 KB for
// the 512 threads. A card of 4.3 TB/s and 132 multiprocessors, whose memory answers after a
// microsecond, needs 33 KB per multiprocessor on their way. From sm_100 on, NVIDIA's compiler takes
// more registers for itself.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr uint32_t kHalfFewRegistersAhead = 14;
#else
inline constexpr uint32_t kHalfFewRegistersAhead = 22;
#endif
inline constexpr uint32_t kHalfFewStepsAhead = 3;  // groups loaded ahead, at most

// What the threads of a block would otherwise keep in registers while they multiply.
struct FewPlaces {
  SharedArray<float, 2 * kTileSide * kPanelWidth> totals;  // [panel, slot, output]
  SharedArray<Tile, 1> tile;
  // Where the row of each slot begins, in units; kNoUnit: the tile has no such slot.
  SharedArray<uint32_t, kTileSide> rows;
};
inline constexpr uint32_t kNoUnit = ~0u;

// Fills `places` for what follows. All threads of the block call it.
GPU_FN void share_places(const ProjectionParams& params, FewPlaces& places) {
  if (thread_index() < kTileSide) {
    const Tile tile = params.tiles[block_y()];
    if (thread_index() == 0) places.tile.at(0) = tile;
    const uint32_t units = params.input_stride / kUnitHalves;
    places.rows.at(thread_index()) = thread_index() < tile.num_slots
                                         ? row_of(params, tile.first_slot + thread_index()) * units
                                         : kNoUnit;
  }
  sync_block();
}

// Where the operands of each team lie in shared memory, in units of 16 bytes. A team works on
// kLanes inputs at a time.
template <class TileOps>
struct FewLayout {
  static constexpr uint32_t kLanes = TileOps::kLanes;
  static constexpr uint32_t kOctets = kLanes / kUnitHalves;
  // Units from one octet of the rows to the next. The 4 beyond kTileSide let threads that store two
  // octets side by side use different banks.
  static constexpr uint32_t kRowStep = kTileSide + 4;
  static constexpr uint32_t kWeights = 2 * kOctets * kPanelWidth;  // [panel, octet, output]
  static constexpr uint32_t kTeam = kWeights + kOctets * kRowStep;
  static constexpr uint32_t kMostTeams = kHalfFewThreads / kLanes;
  static constexpr uint32_t kColumns = kPanelWidth / kTileSide;  // tiles across a panel
  GPU_FN static uint32_t weight(uint32_t team, uint32_t panel, uint32_t octet) {
    return team * kTeam + (panel * kOctets + octet) * kPanelWidth;
  }
  GPU_FN static uint32_t row(uint32_t team, uint32_t octet) {
    return team * kTeam + kWeights + octet * kRowStep;
  }
  // Where a chain's sums lie, counted in floats; they take the place of the weights: [panel, slot,
  // output].
  GPU_FN static uint32_t sum(uint32_t team, uint32_t panel, uint32_t slot, uint32_t column) {
    return team * kTeam * 4 + (panel * kTileSide + slot) * kPanelWidth + column;
  }
  static_assert(kWeights * 4 >= 2 * kTileSide * kPanelWidth);
};

template <class TileOps>
union FewHalves {
  using Layout = FewLayout<TileOps>;
  SharedArray<Unit, Layout::kMostTeams * Layout::kTeam> units;
  SharedArray<float, Layout::kMostTeams * Layout::kTeam * 4> sums;
};

// The format in which a thread keeps a group that it loads ahead: as the group is stored. f32 would
// take twice the registers of bf16, so it is narrowed at once, and the thread waits for the load.
template <WeightFormat kFormat>
inline constexpr WeightFormat kFormatAhead =
    kFormat == WeightFormat::kF32 ? WeightFormat::kBF16 : kFormat;
template <WeightFormat kFormat>
GPU_FN StoredGroup<kFormatAhead<kFormat>> group_ahead(const Record& record, uint32_t group) {
  if constexpr (kFormat == WeightFormat::kF32) {
    StoredGroup<WeightFormat::kBF16> stored{};
    narrow_group<kFormat>(record, group, stored.units);
    return stored;
  } else {
    return load_group<kFormat>(record, group);
  }
}

// What a thread loads for one step: of the weights a group of one output in each panel, and of the
// inputs two units of one row.
template <WeightFormat kFormat>
struct FewWeights {
  StoredGroup<kFormatAhead<kFormat>> groups[2];
};
struct FewInputs {
  Unit units[2];
};

// Where a thread reads its part of the team's chain: the records of its output in both panels (null
// where the output does not exist), and the row of one slot.
template <class TileOps, WeightFormat kFormat>
struct FewSource {
  const unsigned char* records[2];
  uint32_t first;  // of the chain's inputs
  static constexpr uint32_t kLanes = TileOps::kLanes;
  static constexpr uint32_t kRowThreads = kLanes / kTileSide;  // threads that share a row

  GPU_FN static FewSource of(const ProjectionParams& params, uint32_t expert, uint32_t chain) {
    FewSource source{
        {paired_panel<kFormat>(params, expert, 0), paired_panel<kFormat>(params, expert, 1)},
        chain * kChain
    };
    GPU_UNROLL
    for (uint32_t p = 0; p < 2; ++p) {
      if (source.records[p] != nullptr)
        source.records[p] += chain * chain_bytes(kFormat) + lane_index() * kUnitBytes;
    }
    return source;
  }

  GPU_FN static uint32_t group(uint32_t begin) {
    return begin / kGroup + thread_index() % kLanes / kPanelWidth;
  }

  GPU_FN FewWeights<kFormat> weights(uint32_t begin) const {
    FewWeights<kFormat> loaded{};
    GPU_UNROLL
    for (uint32_t p = 0; p < 2; ++p) {
      if (records[p] != nullptr)
        loaded.groups[p] = group_ahead<kFormat>(Record{records[p]}, group(begin));
    }
    return loaded;
  }

  GPU_FN FewInputs inputs(const ProjectionParams& params, uint32_t begin, FewPlaces& places) const {
    FewInputs loaded{};
    const uint32_t row = places.rows.at(thread_index() % kLanes / kRowThreads);
    GPU_UNROLL
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t input =
          first + begin + (thread_index() % kLanes % kRowThreads + j * kRowThreads) * kUnitHalves;
      if (row == kNoUnit || input >= params.input_stride) continue;  // zeros
      loaded.units[j] = load_device_16<Unit>(params.halves + uint64_t{row} * kUnitHalves + input);
    }
    return loaded;
  }
};

// Stores the weights and inputs of the step that begins at input `begin`, as bf16, to where the
// team multiplies them.
template <class TileOps, WeightFormat kFormat>
GPU_FN void store_few(const FewWeights<kFormat>& weights, const FewInputs& inputs, uint32_t begin,
                      uint32_t team, FewHalves<TileOps>& shared) {
  using Layout = FewLayout<TileOps>;
  using Source = FewSource<TileOps, kFormat>;
  const uint32_t lane = thread_index() % TileOps::kLanes;
  GPU_UNROLL
  for (uint32_t p = 0; p < 2; ++p) {
    narrow_units<kFormatAhead<kFormat>>(
        weights.groups[p], Source::group(begin), [&](uint32_t u, const Unit& unit) {
          shared.units.at(Layout::weight(team, p, lane / kPanelWidth * kGroupUnits + u) +
                          lane % kPanelWidth) = unit;
        });
  }
  GPU_UNROLL
  for (uint32_t j = 0; j < 2; ++j) {
    shared.units.at(Layout::row(team, lane % Source::kRowThreads + j * Source::kRowThreads) +
                    lane / Source::kRowThreads) = inputs.units[j];
  }
}

// Multiplies what store_few() stored, and adds the products to `sums`. All threads of the team.
template <class TileOps>
GPU_FN void multiply_few(uint32_t team, FewHalves<TileOps>& shared,
                         typename TileOps::Sums (*sums)[FewLayout<TileOps>::kColumns]) {
  using Layout = FewLayout<TileOps>;
  GPU_UNROLL
  for (uint32_t octet = 0; octet < Layout::kOctets; octet += kTileOctets) {
    const auto rows = TileOps::load(shared.units, Layout::row(team, octet), Layout::kRowStep);
    GPU_UNROLL
    for (uint32_t p = 0; p < 2; ++p) {
      GPU_UNROLL
      for (uint32_t c = 0; c < Layout::kColumns; ++c) {
        const auto weights = TileOps::load(
            shared.units, Layout::weight(team, p, octet) + c * kTileSide, kPanelWidth);
        TileOps::multiply_add(sums[p][c], rows, weights);
      }
    }
  }
}

// Computes the team's chain and leaves its sums in shared memory. All teams take equally many
// steps, also where a chain is shorter or missing, because a team of the simulator may wait for all
// others at its barrier.
template <class TileOps, WeightFormat kFormat>
GPU_FN void few_chain(const ProjectionParams& params, uint32_t chain, FewPlaces& places,
                      FewHalves<TileOps>& shared) {
  using Layout = FewLayout<TileOps>;
  constexpr uint32_t kLanes = TileOps::kLanes;
  constexpr uint32_t kAhead =
      groups_ahead(kFormatAhead<kFormat>, kHalfFewRegistersAhead, kHalfFewStepsAhead);
  const uint32_t team = thread_index() / kLanes, first = chain * kChain;
  const uint32_t count = first < params.num_inputs ? smaller(kChain, params.num_inputs - first) : 0;
  const auto source = FewSource<TileOps, kFormat>::of(params, places.tile.at(0).expert, chain);
  typename TileOps::Sums sums[2][Layout::kColumns];
  FewWeights<kFormat> ahead[kAhead] = {};
  FewInputs inputs{};
  GPU_UNROLL
  for (uint32_t i = 0; i < kAhead; ++i) {
    if (i * kLanes < count) ahead[i] = source.weights(i * kLanes);
  }
  if (count != 0) inputs = source.inputs(params, 0, places);
  for (uint32_t begin = 0; begin <= kChain; begin += kLanes) {
    if (begin != 0 && begin - kLanes < count) multiply_few<TileOps>(team, shared, sums);
    TileOps::sync_team();
    if (begin < count) {
      store_few<TileOps, kFormat>(ahead[0], inputs, begin, team, shared);
      GPU_UNROLL
      for (uint32_t i = 1; i < kAhead; ++i) ahead[i - 1] = ahead[i];
      if (begin + kAhead * kLanes < count)
        ahead[kAhead - 1] = source.weights(begin + kAhead * kLanes);
      if (begin + kLanes < count) inputs = source.inputs(params, begin + kLanes, places);
    }
    TileOps::sync_team();
  }
  if (count == 0) return;
  GPU_UNROLL
  for (uint32_t p = 0; p < 2; ++p) {
    GPU_UNROLL
    for (uint32_t c = 0; c < Layout::kColumns; ++c) {
      GPU_UNROLL
      for (uint32_t i = 0; i < TileOps::kValues; ++i) {
        shared.sums.at(Layout::sum(team, p, TileOps::row(i), c * kTileSide + TileOps::column(i))) =
            sums[p][c].values[i];
      }
    }
  }
}

// Adds the chain sums of the first `present` teams to the totals, in ascending order. A thread owns
// every block_threads()-th place of the totals, here and where they are written out.
template <class TileOps>
GPU_FN void add_few(uint32_t present, bool is_first, FewHalves<TileOps>& shared,
                    FewPlaces& places) {
  using Layout = FewLayout<TileOps>;
  for (uint32_t at = thread_index(); at < places.tile.at(0).num_slots * kPanelWidth;
       at += block_threads()) {
    GPU_UNROLL
    for (uint32_t p = 0; p < 2; ++p) {
      float& kept = places.totals.at(p * kTileSide * kPanelWidth + at);
      float total = is_first ? 0.0f : kept;
      for (uint32_t team = 0; team < present; ++team) {
        const float sum = shared.sums.at(Layout::sum(team, p, at / kPanelWidth, at % kPanelWidth));
        total = is_first && team == 0 ? sum : add(total, sum);
      }
      kept = total;
    }
  }
}

// The kernel: grid_x counts pairs of panels, grid_y the tiles of the few-row kernels.
template <class TileOps, WeightFormat kFormat>
GPU_FN void bf16_few(const ProjectionParams& params) {
  if constexpr (TileOps::kExists) {
    GPU_SHARED(FewHalves<TileOps>, shared);
    GPU_SHARED(FewPlaces, places);
    if (block_y() >= *params.num_tiles) return;  // the whole block
    share_places(params, places);
    const uint32_t num_teams = block_threads() / TileOps::kLanes,
                   chains = num_chains(params.num_inputs);
    for (uint32_t first = 0; first < chains; first += num_teams) {
      few_chain<TileOps, kFormat>(params, first + thread_index() / TileOps::kLanes, places, shared);
      sync_block();
      add_few<TileOps>(smaller(num_teams, chains - first), first == 0, shared, places);
      sync_block();
    }
    const Tile tile = places.tile.at(0);
    for (uint32_t at = thread_index(); at < tile.num_slots * kPanelWidth; at += block_threads()) {
      finish_column(params, tile.expert, tile.first_slot + at / kPanelWidth, at % kPanelWidth,
                    places.totals.at(at), places.totals.at(kTileSide * kPanelWidth + at));
    }
  } else {
    stop_kernel();
  }
}

}  // namespace dflash::compute::gpu

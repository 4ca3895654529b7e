// Matrix-unit classes, few rows: a block computes two panels of 32 outputs for up to 16 slots, one tile high. Each team takes one chain of 256
// inputs, all at once; chain sums are added in ascending order, as the many-row kernel adds them, so that both have the same bits. The
// bound is the bandwidth at which weights are read: the next group's are on their way while a group is multiplied.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/bf16_stage.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kHalfFewThreads = 256;  // at most; a multiple of 64

// What a team has in shared memory, in units; `kLanes` inputs at a time.
template <class TileOps>
struct FewLayout {
  static constexpr uint32_t kLanes = TileOps::kLanes;
  static constexpr uint32_t kOctets = kLanes / kUnitHalves;
  static constexpr uint32_t kRowStep = kTileSide + 4;  // units from octet to octet: stores of two octets side by side meet no bank twice
  static constexpr uint32_t kWeights = 2 * kOctets * kPanelWidth;  // [panel, octet, output]
  static constexpr uint32_t kTeam = kWeights + kOctets * kRowStep;
  static constexpr uint32_t kMostTeams = kHalfFewThreads / kLanes;
  static constexpr uint32_t kColumns = kPanelWidth / kTileSide;  // tiles across a panel
  GPU_FN static uint32_t weight(uint32_t team, uint32_t panel, uint32_t octet) { return team * kTeam + (panel * kOctets + octet) * kPanelWidth; }
  GPU_FN static uint32_t row(uint32_t team, uint32_t octet) { return team * kTeam + kWeights + octet * kRowStep; }
  // Chain sums as floats, in the place of the weights: [panel, slot, output].
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

// One step of a thread: a group of 32 weights of one output of each panel, and two units of one row.
struct FewStaged {
  Unit weights[2][kGroupUnits];
  Unit rows[2];
};

// Where a thread reads: its output's records of both panels at the team's chain, and its row.
template <class TileOps, WeightFormat kFormat>
struct FewSource {
  const unsigned char* panels[2];
  const uint16_t* row;
  uint32_t chain;
  static constexpr uint32_t kLanes = TileOps::kLanes;
  static constexpr uint32_t kRowThreads = kLanes / kTileSide;  // that share a row

  GPU_FN FewStaged fetch(const ProjectionParams& params, uint32_t begin) const {
    FewStaged staged{};
    const uint32_t lane = thread_index() % kLanes, first = chain * kChain + begin;
    const uint32_t group = begin / kGroup + lane / kPanelWidth;
    GPU_UNROLL
    for (uint32_t p = 0; p < 2; ++p) {
      if (panels[p] == nullptr) continue;
      const Record record{panels[p] + chain * chain_bytes(kFormat) + lane % kPanelWidth * kUnitBytes};
      narrow_group<kFormat>(record, group, staged.weights[p]);
    }
    GPU_UNROLL
    for (uint32_t j = 0; j < 2; ++j) {
      staged.rows[j] = row_unit(params, row, first + (lane % kRowThreads + j * kRowThreads) * kUnitHalves);
    }
    return staged;
  }
};

template <class TileOps>
GPU_FN void store_few(const FewStaged& staged, uint32_t team, FewHalves<TileOps>& shared) {
  using Layout = FewLayout<TileOps>;
  constexpr uint32_t kRowThreads = TileOps::kLanes / kTileSide;
  const uint32_t lane = thread_index() % TileOps::kLanes;
  GPU_UNROLL
  for (uint32_t p = 0; p < 2; ++p) {
    GPU_UNROLL
    for (uint32_t u = 0; u < kGroupUnits; ++u) {
      shared.units.at(Layout::weight(team, p, lane / kPanelWidth * kGroupUnits + u) + lane % kPanelWidth) = staged.weights[p][u];
    }
  }
  GPU_UNROLL
  for (uint32_t j = 0; j < 2; ++j) {
    shared.units.at(Layout::row(team, lane % kRowThreads + j * kRowThreads) + lane / kRowThreads) = staged.rows[j];
  }
}

template <class TileOps>
GPU_FN void multiply_few(uint32_t team, FewHalves<TileOps>& shared, typename TileOps::Sums (*sums)[FewLayout<TileOps>::kColumns]) {
  using Layout = FewLayout<TileOps>;
  GPU_UNROLL
  for (uint32_t octet = 0; octet < Layout::kOctets; octet += kTileOctets) {
    const auto rows = TileOps::load(shared.units, Layout::row(team, octet), Layout::kRowStep);
    GPU_UNROLL
    for (uint32_t p = 0; p < 2; ++p) {
      GPU_UNROLL
      for (uint32_t c = 0; c < Layout::kColumns; ++c) {
        const auto weights = TileOps::load(shared.units, Layout::weight(team, p, octet) + c * kTileSide, kPanelWidth);
        TileOps::multiply_add(sums[p][c], rows, weights);
      }
    }
  }
}

// The sums of the team's chain into shared memory. All teams take as many steps, since a team of the simulator may wait for all others.
template <class TileOps, WeightFormat kFormat>
GPU_FN void few_chain(const ProjectionParams& params, const FewSource<TileOps, kFormat>& source, FewHalves<TileOps>& shared) {
  using Layout = FewLayout<TileOps>;
  const uint32_t team = thread_index() / TileOps::kLanes, first = source.chain * kChain;
  const uint32_t count = first < params.num_inputs ? smaller(kChain, params.num_inputs - first) : 0;
  typename TileOps::Sums sums[2][Layout::kColumns];
  FewStaged staged;
  for (uint32_t begin = 0; begin <= kChain; begin += TileOps::kLanes) {
    if (begin < count) staged = source.fetch(params, begin);
    if (begin != 0 && begin - TileOps::kLanes < count) multiply_few<TileOps>(team, shared, sums);
    TileOps::sync_team();
    if (begin < count) store_few<TileOps>(staged, team, shared);
    TileOps::sync_team();
  }
  if (count == 0) return;
  GPU_UNROLL
  for (uint32_t p = 0; p < 2; ++p) {
    GPU_UNROLL
    for (uint32_t c = 0; c < Layout::kColumns; ++c) {
      GPU_UNROLL
      for (uint32_t i = 0; i < TileOps::kValues; ++i) {
        shared.sums.at(Layout::sum(team, p, TileOps::row(i), c * kTileSide + TileOps::column(i))) = sums[p][c].values[i];
      }
    }
  }
}

template <class TileOps, WeightFormat kFormat>
GPU_FN void bf16_few(const ProjectionParams& params) {
  if constexpr (TileOps::kExists) {
    using Layout = FewLayout<TileOps>;
    using Source = FewSource<TileOps, kFormat>;
    constexpr uint32_t kMostOwned = kTileSide * kPanelWidth / 64;  // columns of slots that a thread adds up: all of them by 64 threads
    GPU_SHARED(FewHalves<TileOps>, shared);
    if (block_y() >= *params.num_tiles) return;  // the whole block
    const Tile tile = params.tiles[block_y()];
    const uint32_t num_teams = block_threads() / TileOps::kLanes, chains = num_chains(params.num_inputs);
    Source source{{paired_panel<kFormat>(params, tile.expert, 0), paired_panel<kFormat>(params, tile.expert, 1)},
                  halves_of(params, tile, thread_index() % TileOps::kLanes / Source::kRowThreads),
                  thread_index() / TileOps::kLanes};
    float totals[kMostOwned][2] = {};
    for (uint32_t first = 0; first < chains; first += num_teams, source.chain += num_teams) {
      few_chain<TileOps, kFormat>(params, source, shared);
      sync_block();
      GPU_UNROLL
      for (uint32_t i = 0; i < kMostOwned; ++i) {
        const uint32_t at = thread_index() + i * block_threads();
        if (at >= tile.num_slots * kPanelWidth) break;
        for (uint32_t team = 0; team < smaller(num_teams, chains - first); ++team) {
          GPU_UNROLL
          for (uint32_t p = 0; p < 2; ++p) {
            const float sum = shared.sums.at(Layout::sum(team, p, at / kPanelWidth, at % kPanelWidth));
            totals[i][p] = first + team == 0 ? sum : add(totals[i][p], sum);
          }
        }
      }
      sync_block();
    }
    GPU_UNROLL
    for (uint32_t i = 0; i < kMostOwned; ++i) {
      const uint32_t at = thread_index() + i * block_threads();
      if (at >= tile.num_slots * kPanelWidth) break;
      finish_column(params, tile.expert, tile.first_slot + at / kPanelWidth, at % kPanelWidth, totals[i][0], totals[i][1]);
    }
  } else {
    stop_kernel();
  }
}

}  // namespace dflash::compute::gpu

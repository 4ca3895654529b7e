// The expert kernels, written once over a vector type V and a weight element W. Included by kernels_<set>.cc only; V is a type of
// its own per set, so no two files instantiate the same symbol. No std:: code (it could be linked into portable callers).
//
// Dims: M rows of one expert, N outputs in panels of 2 vectors, K inputs. Per output: K in blocks of 256, one fma chain per block
// from +0 with ascending k, block sums added in ascending order. Registers hold M x (2 * NP) accumulators; each weight vector is
// loaded once per tile of rows. Bound: fma throughput from about 6 rows on, memory bandwidth of the weights below that.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/activation.h"
#include "compute/cpu/kernel_set.h"

namespace dflash::compute {

template <class V>
inline constexpr int kPanelWidth = 2 * V::kLanes;

// Panels handled at once for M rows: as many as the accumulators allow, so that few rows still hide the fma's latency.
template <class V>
constexpr int panels_at_once(int num_rows) {
  return 8 * num_rows <= V::kAccumulators ? 4 : 4 * num_rows <= V::kAccumulators ? 2 : 1;
}

// Fetches the weights some steps ahead. Measured on Zen 5 over 0.5..4 KiB: single rows stream best at 1 KiB (92 % of read bandwidth
// against 88 % without), tiles of rows at 4 KiB (16 rows per expert: 70 % of fma peak against 53 % without).
template <class V, class W, int M>
inline void prefetch_ahead(const W* step) {
  constexpr size_t kAhead = M <= 3 ? 1024 : 4096;
  constexpr size_t kStepBytes = sizeof(W) * kPanelWidth<V>;
  if constexpr (kStepBytes >= 32) {  // shorter steps (one lane) are bound by arithmetic
    for (size_t line = 0; line < kStepBytes; line += 64) __builtin_prefetch(reinterpret_cast<const char*>(step) + kAhead + line);
  }
}

// One K block [k_begin, k_end) of M rows by NP panels; adds the chains' sums to `tile` (or stores them, in the first block).
template <class V, class W, int M, int NP>
inline void chain_block(const float* const* rows, const W* panels, size_t panel_elements, uint32_t k_begin, uint32_t k_end,
                        float* tile, size_t tile_stride) {
  using F = typename V::F;
  F sums[M][2 * NP];
  const float* inputs[M];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    inputs[m] = rows[m];
#pragma GCC unroll 8
    for (int n = 0; n < 2 * NP; ++n) sums[m][n] = V::set1(0.0f);
  }
#pragma GCC unroll 2
  for (size_t k = k_begin; k < k_end; ++k) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      F weights[2];
      const W* step = panels + static_cast<size_t>(p) * panel_elements + k * kPanelWidth<V>;
      prefetch_ahead<V, W, M>(step);
      V::load_weights(step, weights);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const F input = V::set1(inputs[m][k]);
        sums[m][2 * p] = V::fma(weights[0], input, sums[m][2 * p]);
        sums[m][2 * p + 1] = V::fma(weights[1], input, sums[m][2 * p + 1]);
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < 2 * NP; ++n) {
      float* at = tile + static_cast<size_t>(m) * tile_stride + static_cast<size_t>(n) * V::kLanes;
      V::store(at, k_begin == 0 ? sums[m][n] : V::add(V::load(at), sums[m][n]));
    }
  }
}

// All K blocks of NP panels: panels outermost, so that weights are read in one ascending stream.
template <class V, class W, int M, int NP>
inline void run_panels(const PanelRun& run, const W* panels, const float* const* rows, float* tile, size_t stride) {
  const size_t panel_elements = run.panel_bytes / sizeof(W);
  for (uint32_t k = 0; k < run.num_inputs; k += kChainLength) {
    const uint32_t end = run.num_inputs - k < kChainLength ? run.num_inputs : k + kChainLength;
    chain_block<V, W, M, NP>(rows, panels, panel_elements, k, end, tile, stride);
  }
}

// M rows through a whole run of panels into tile [M][num_panels * panel_width], bias included.
template <class V, class W, int M>
void run_tile(const PanelRun& run, const float* const* rows, float* tile) {
  constexpr uint32_t kAtOnce = static_cast<uint32_t>(panels_at_once<V>(M));
  const size_t panel_elements = run.panel_bytes / sizeof(W);
  const W* panels = reinterpret_cast<const W*>(run.first);
  const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
  uint32_t p = 0;
  for (; p + kAtOnce <= run.num_panels; p += kAtOnce) {
    run_panels<V, W, M, static_cast<int>(kAtOnce)>(run, panels + p * panel_elements, rows, tile + p * kPanelWidth<V>, stride);
  }
  for (; p < run.num_panels; ++p) {
    run_panels<V, W, M, 1>(run, panels + p * panel_elements, rows, tile + p * kPanelWidth<V>, stride);
  }
  if (run.bias == nullptr) return;
  for (int m = 0; m < M; ++m) {
    float* at = tile + static_cast<size_t>(m) * stride;
    for (size_t n = 0; n < stride; n += V::kLanes) V::store(at + n, V::add(V::load(at + n), V::load(run.bias + n)));
  }
}

template <class V, class W>
void run_tile_of(uint32_t num_rows, const PanelRun& run, const float* const* rows, float* tile) {
  switch (num_rows) {
    case 1: return run_tile<V, W, 1>(run, rows, tile);
    case 2: return run_tile<V, W, 2>(run, rows, tile);
    case 3: return run_tile<V, W, 3>(run, rows, tile);
    case 4: return run_tile<V, W, 4>(run, rows, tile);
    default: break;
  }
  if constexpr (V::kMaxTileRows >= 6) {
    if (num_rows == 5) return run_tile<V, W, 5>(run, rows, tile);
    if (num_rows == 6) return run_tile<V, W, 6>(run, rows, tile);
  }
  if constexpr (V::kMaxTileRows >= 12) {
    switch (num_rows) {
      case 7: return run_tile<V, W, 7>(run, rows, tile);
      case 8: return run_tile<V, W, 8>(run, rows, tile);
      case 9: return run_tile<V, W, 9>(run, rows, tile);
      case 10: return run_tile<V, W, 10>(run, rows, tile);
      case 11: return run_tile<V, W, 11>(run, rows, tile);
      case 12: return run_tile<V, W, 12>(run, rows, tile);
      default: break;
    }
  }
}

template <class V, class W>
void gate_up_tile(const GateUpTile& args) {
  alignas(64) float tile[V::kMaxTileRows * kMaxGroupPanels * kPanelWidth<V>];
  run_tile_of<V, W>(args.num_rows, args.panels, args.rows, tile);
  const uint32_t num_matrices = args.spec->gate == GateKind::kNone ? 1 : 2;
  const size_t stride = static_cast<size_t>(args.panels.num_panels) * kPanelWidth<V>;
  for (uint32_t m = 0; m < args.num_rows; ++m) {
    const float* sums = tile + m * stride;
    float* out = args.intermediate[m];
    for (uint32_t p = 0; p < args.panels.num_panels; p += num_matrices) {
      const float* g = sums + static_cast<size_t>(p) * kPanelWidth<V>;
      const float* u = g + static_cast<size_t>(num_matrices - 1) * kPanelWidth<V>;
      for (int n = 0; n < kPanelWidth<V>; n += V::kLanes, out += V::kLanes) {
        V::store(out, gate<V>(*args.spec, V::load(g + n), V::load(u + n)));
      }
    }
  }
}

template <class V, class W>
void down_tile(const DownTile& args) {
  alignas(64) float tile[V::kMaxTileRows * kMaxGroupPanels * kPanelWidth<V>];
  run_tile_of<V, W>(args.num_rows, args.panels, args.rows, tile);
  const size_t stride = static_cast<size_t>(args.panels.num_panels) * kPanelWidth<V>;
  for (uint32_t m = 0; m < args.num_rows; ++m) {
    const typename V::F weight = V::set1(args.weights[m]);
    const float* down = tile + m * stride;
    float* sum = args.sums[m];
    for (size_t n = 0; n < stride; n += V::kLanes) {
      V::store(sum + n, V::fma(weight, V::load(down + n), V::load(sum + n)));
    }
  }
}

template <class V>
void canonicalize_nan(float* values, size_t count) {
  for (size_t n = 0; n < count; n += V::kLanes) V::store(values + n, V::canonical_nan(V::load(values + n)));
}

template <class V>
constexpr KernelSet make_kernel_set() {
  static_assert(V::kMaxTileRows <= static_cast<int>(kMaxTileRows));
  return KernelSet{
      .panel_width = kPanelWidth<V>,
      .max_tile_rows = V::kMaxTileRows,
      .gate_up = {gate_up_tile<V, float>, gate_up_tile<V, typename V::F16>, gate_up_tile<V, typename V::BF16>},
      .down = {down_tile<V, float>, down_tile<V, typename V::F16>, down_tile<V, typename V::BF16>},
      .canonicalize_nan = canonicalize_nan<V>,
  };
}

}  // namespace dflash::compute

// What every numerics class does around its matrix products, on whole calls: passes over panels,
// biases, the activation, the routed sum. Written once over a vector type V and the products P of a
// class:
//   static void multiply(uint32_t num_rows, const PanelRun& run, const void* const* rows, float*
//   tile);  // no bias static constexpr ... kEncodedBytes, kEncode, kGateUpEncodes;  // as
//   KernelSet has them static void store(typename V::F values, void* row, size_t column);  // a
//   vector of intermediate values, encoded where kGateUpEncodes
// Included by kernel files only, which give V; no std:: code (it could be linked into portable
// callers).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/few_rows.h"
#include "compute/experts/activation.h"

namespace dflash::compute {

// Panels of a run that one pass handles: many rows take the panels of one gate and up, so that the
// sums of all rows stay near.
inline constexpr uint32_t kManyRowsPanels = 2;
template <class V>
inline constexpr size_t kTileFloats =
    static_cast<size_t>(kPanelWidth<V>) *
    (kFewRows * kMaxGroupPanels > kMaxCallRows * kManyRowsPanels ? kFewRows * kMaxGroupPanels
                                                                 : kMaxCallRows * kManyRowsPanels);

template <class V, class P>
void multiply(uint32_t num_rows, const PanelRun& run, const void* const* rows, float* tile) {
  P::multiply(num_rows, run, rows, tile);
  if (run.bias == nullptr) return;
  const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
  for (uint32_t m = 0; m < num_rows; ++m) {
    float* at = tile + m * stride;
    for (size_t n = 0; n < stride; n += V::kLanes)
      V::store(at + n, V::add(V::load(at + n), V::load(run.bias + n)));
  }
}

// Calls body(panels, first) with the run in passes; `first` counts panels from the run's first.
template <class V, class Body>
inline void in_passes(uint32_t num_rows, const PanelRun& run, uint32_t at_once, const Body& body) {
  if (num_rows <= kFewRows) return body(run, 0u);
  for (uint32_t first = 0; first < run.num_panels; first += at_once) {
    PanelRun part = run;
    part.first = run.first + first * run.panel_bytes;
    part.num_panels = run.num_panels - first < at_once ? run.num_panels - first : at_once;
    if (run.bias != nullptr) part.bias = run.bias + static_cast<size_t>(first) * kPanelWidth<V>;
    body(part, first);
  }
}

template <class V, class P>
void gate_up_tile(const GateUpTile& args) {
  alignas(64) float tile[kTileFloats<V>];
  const uint32_t num_matrices = args.spec->gate == GateKind::kNone ? 1 : 2;
  in_passes<V>(args.num_rows, args.panels, kManyRowsPanels,
               [&](const PanelRun& run, uint32_t first) {
                 multiply<V, P>(args.num_rows, run, args.rows, tile);
                 const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
                 for (uint32_t m = 0; m < args.num_rows; ++m) {
                   const float* sums = tile + m * stride;
                   size_t column = static_cast<size_t>(first / num_matrices) * kPanelWidth<V>;
                   for (uint32_t p = 0; p < run.num_panels; p += num_matrices) {
                     const float* g = sums + static_cast<size_t>(p) * kPanelWidth<V>;
                     const float* u = g + static_cast<size_t>(num_matrices - 1) * kPanelWidth<V>;
                     for (int n = 0; n < kPanelWidth<V>; n += V::kLanes, column += V::kLanes) {
                       P::store(gate<V>(*args.spec, V::load(g + n), V::load(u + n)),
                                args.intermediate[m], column);
                     }
                   }
                 }
               });
}

template <class V, class P>
void down_tile(const DownTile& args) {
  alignas(64) float tile[kTileFloats<V>];
  in_passes<V>(args.num_rows, args.panels, kManyRowsPanels,
               [&](const PanelRun& run, uint32_t first) {
                 multiply<V, P>(args.num_rows, run, args.rows, tile);
                 const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
                 for (uint32_t m = 0; m < args.num_rows; ++m) {
                   const typename V::F weight = V::set1(args.weights[m]);
                   const float* down = tile + m * stride;
                   float* sum = args.sums[m] + static_cast<size_t>(first) * kPanelWidth<V>;
                   for (size_t n = 0; n < stride; n += V::kLanes)
                     V::store(sum + n, V::fma(weight, V::load(down + n), V::load(sum + n)));
                 }
               });
}

// What gate_up_tile and down_tile do beyond this is what a layer costs beyond its matrix products.
template <class V, class P>
void multiply_only(const PanelRun& panels, const void* const* rows, uint32_t num_rows) {
  alignas(64) float tile[kTileFloats<V>];
  in_passes<V>(num_rows, panels, kManyRowsPanels, [&](const PanelRun& run, uint32_t) {
    multiply<V, P>(num_rows, run, rows, tile);
    asm volatile("" : : "r"(tile) : "memory");  // the products count as used
  });
}

template <class V>
void canonicalize_nan(float* values, size_t count) {
  for (size_t n = 0; n < count; n += V::kLanes)
    V::store(values + n, V::canonical_nan(V::load(values + n)));
}

template <class V, class P>
constexpr KernelSet make_kernel_set() {
  return KernelSet{.numerics = P::kNumerics,
                   .panel_width = kPanelWidth<V>,
                   .pack = nullptr,
                   .encoded_bytes = P::kEncodedBytes,
                   .encode = P::kEncode,
                   .gate_up_encodes = P::kGateUpEncodes,
                   .gate_up = gate_up_tile<V, P>,
                   .down = down_tile<V, P>,
                   .multiply_only = multiply_only<V, P>,
                   .canonicalize_nan = canonicalize_nan<V>};
}

}  // namespace dflash::compute

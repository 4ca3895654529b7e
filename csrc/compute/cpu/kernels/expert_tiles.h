// What every numerics class does around its matrix products, on whole calls: passes over panels,
// biases, the activation and the routed sum. It is written once over a vector type V and the
// products P of a class:
//
//   multiply(num_rows, run, rows, tile)     the products of a PanelRun, without biases
//   kEncodedBytes, kEncode, kGateUpEncodes  as KernelSet has them
//   store(values, row, column)              stores a vector of intermediate values, encoded
//                                           where kGateUpEncodes
//
// Included by kernel files only, which provide V. There is no std:: code here, because its
// instantiations could be linked into portable callers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/few_rows.h"
#include "compute/experts/activation.h"

namespace dflash::compute {

// Floats of the sums that a call keeps on its stack: those of few rows over a whole group of
// panels, or those of many rows over one pass.
template <class V>
inline constexpr size_t kTileFloats =
    static_cast<size_t>(kPanelWidth<V>) *
    (kFewRows * kMaxGroupPanels > kMaxCallRows * kManyRowsPanels ? kFewRows * kMaxGroupPanels
                                                                 : kMaxCallRows * kManyRowsPanels);

// The products of `rows` with a run of panels, biases added; `tile` is KernelSet::multiply's.
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

// Calls body(panels, first) for each pass over a run, where `first` is the pass's first panel,
// counted from the run's. Few rows take the whole run at once; many rows take `at_once` panels a
// pass, so that their sums stay in a near cache.
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

// KernelSet::gate_up: the gate and up products of up to kMaxCallRows rows, and the activation.
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

// KernelSet::down: the down products, weighted and added to each row's routed sum.
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

template <class V>
void canonicalize_nan(float* values, size_t count) {
  for (size_t n = 0; n < count; n += V::kLanes)
    V::store(values + n, V::canonical_nan(V::load(values + n)));
}

template <class V, class P>
constexpr KernelSet make_kernel_set() {
  static_assert(kPanelWidth<V> <= kMaxPanelWidth);
  return KernelSet{.numerics = P::kNumerics,
                   .panel_width = kPanelWidth<V>,
                   .pack = nullptr,
                   .unpack = nullptr,
                   .encoded_bytes = P::kEncodedBytes,
                   .encode = P::kEncode,
                   .gate_up_encodes = P::kGateUpEncodes,
                   .gate_up = gate_up_tile<V, P>,
                   .down = down_tile<V, P>,
                   .multiply = multiply<V, P>,
                   .canonicalize_nan = canonicalize_nan<V>};
}

}  // namespace dflash::compute

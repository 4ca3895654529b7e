// What joins the matrices of an MLP that stays at the host: the gate formulas of the experts
// (experts/activation.h), and a row scaled by a gate of its own and added to another.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/experts/activation.h"
#include "compute/operators/lanes.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

// out = gate(spec, g, u); without a gate, g is ignored and may be null. `out` may be g or u.
template <class V>
[[gnu::flatten]] void gate_row(const FfnSpec& spec, const float* g, const float* u, float* out,
                               uint32_t width) {
  using F = typename V::F;
  if (g == nullptr) g = u;
  in_blocks<V>(width, [&](uint32_t first, uint32_t count) {
    store_block<V>(
        out + first,
        map_block<V>([&](F a, F b) { return gate<V>(spec, a, b); },
                     load_block<V>(g + first, count, 0.0f), load_block<V>(u + first, count, 0.0f)),
        count);
  });
}

// One row that is scaled and added: out = fma(x, s, base), or x * s where there is no base. s is
// sigmoid(gate) where there is a gate, else `scale`. `out` may be x or base.
struct ScaledRow {
  const float* x;     // [width]
  const float* base;  // [width]; null: none
  const float* gate;  // [1]; null: none
  float scale;
  float* out;  // [width]
  uint32_t width;
};

template <class V>
[[gnu::flatten]] void add_scaled_row(const ScaledRow& row) {
  using F = typename V::F;
  const F s = row.gate == nullptr ? V::set1(row.scale) : sigmoid<V>(V::set1(*row.gate));
  in_blocks<V>(row.width, [&](uint32_t first, uint32_t count) {
    LaneBlock<V> y = load_block<V>(row.x + first, count, 0.0f);
    if (row.base == nullptr)
      y = map_block<V>([&](F x) { return V::mul(x, s); }, y);
    else
      y = map_block<V>([&](F x, F base) { return V::fma(x, s, base); }, y,
                       load_block<V>(row.base + first, count, 0.0f));
    store_block<V>(row.out + first, y, count);
  });
}

}  // namespace dflash::compute

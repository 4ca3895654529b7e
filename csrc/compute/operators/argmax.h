// The place of a row's largest value: the lowest among equal ones. NaN never wins; a row of NaN
// alone gives 0.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/operators/lanes.h"

namespace dflash::compute {

// Places are counted in float32 lanes, which hold integers up to this one exactly.
inline constexpr uint32_t kMaxArgmaxWidth = 1u << 24;

template <class V>
[[gnu::flatten]] uint32_t argmax_row(const float* values, uint32_t width) {
  using F = typename V::F;
  const float infinity = __builtin_inff();
  float lanes[kBlockLanes], places[kBlockLanes];
  for (uint32_t i = 0; i < kBlockLanes; ++i) lanes[i] = static_cast<float>(i);
  LaneBlock<V> at = load_block<V>(lanes, kBlockLanes, 0.0f);
  LaneBlock<V> best = fill_block<V>(-infinity), best_at = fill_block<V>(infinity);
  in_blocks<V>(width, [&](uint32_t first, uint32_t count) {
    const LaneBlock<V> x = load_block<V>(values + first, count, __builtin_nanf(""));
    // Only a greater value takes a lane, so that the first of equal ones keeps it.
    for (int p = 0; p < LaneBlock<V>::kVectors; ++p) {
      best_at.part[p] = V::select_greater(x.part[p], best.part[p], at.part[p], best_at.part[p]);
      best.part[p] = V::select_greater(x.part[p], best.part[p], x.part[p], best.part[p]);
    }
    at = map_block<V>([](F a) { return V::add(a, V::set1(16.0f)); }, at);
  });
  store_block<V>(lanes, best, kBlockLanes);
  store_block<V>(places, best_at, kBlockLanes);
  uint32_t lane = 0;
  for (uint32_t i = 1; i < kBlockLanes; ++i) {
    if (lanes[i] > lanes[lane] || (lanes[i] == lanes[lane] && places[i] < places[lane])) lane = i;
  }
  if (places[lane] != infinity) return static_cast<uint32_t>(places[lane]);
  for (uint32_t i = 0; i < width; ++i) {
    if (values[i] == -infinity) return i;  // nothing is greater than the first infinity below
  }
  return 0;
}

}  // namespace dflash::compute

// The integer codes of the formats with grids, in the form of int8_codes.h: signed bytes in
// ascending order. Included by int8_products.h; no std:: code (canonical_products.h says why).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/grid_formats.h"
#include "compute/cpu/kernels/int8_codes.h"

namespace dflash::compute {

template <class V, class D, WeightFormat kFormat>
  requires(has_grid(kFormat))
struct IntegerCodes<V, D, kFormat> {
  using F = typename V::F;
  using I = typename V::I;
  using Codes = GridCodes<V, kFormat>;
  static constexpr uint32_t kSplit = Codes::kHasTwoScales ? 2 : 1;  // groups per stored group
  static constexpr CodeTraits kTraits{8 / kSplit, true, false, false, 0};
  static constexpr size_t kVectorBytes = 4 * V::kLanes;
  // The same records, seen in groups that have one scale.
  static constexpr PanelLayout kLayout = [] {
    PanelLayout layout = panel_layout(kFormat);
    layout.header_bytes = static_cast<uint32_t>(layout.record_bytes());
    layout.group_inputs /= kSplit;
    layout.scale_bytes = layout.code_bytes = 0;
    return layout;
  }();

  [[gnu::always_inline]] static inline F scale(const uint8_t* record, uint32_t group, int half) {
    return Codes::scale(Codes::open(record, group / kSplit, half), group % kSplit);
  }

  struct Tables {};
  [[gnu::always_inline]] static inline Tables tables() { return {}; }

  template <class Body>
  [[gnu::always_inline]] static inline void unfold(const Tables&, const uint8_t* record,
                                                   uint32_t group, const Body& body) {
    const typename Codes::Group halves[2] = {Codes::open(record, group / kSplit, 0),
                                             Codes::open(record, group / kSplit, 1)};
#pragma GCC unroll 4
    for (uint32_t o = 0; o < 4 / kSplit; ++o) {
#pragma GCC unroll 2
      for (uint32_t h = 0; h < 2; ++h) {
        const typename Codes::Octet octet =
            Codes::octet(halves[h], group % kSplit * (4 / kSplit) + o);
        body(2 * o, h, D::as_signed_codes(octet.words[0]));
        body(2 * o + 1, h, D::as_signed_codes(octet.words[1]));
      }
    }
  }
};

}  // namespace dflash::compute

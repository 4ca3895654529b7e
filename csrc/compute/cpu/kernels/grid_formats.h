// How a vector type V reads panels of the formats with grids (panel_layout.h): entries are gathered
// from the one table (grid_table.h), a word of four magnitudes per lane, and get their signs there,
// byte by byte. What is made is four signed codes per lane, which both f32-canonical and
// int8-groups take. Included by canonical_products.h and int8_products.h; no std:: code
// (canonical_products.h says why).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/panels/panel_layout.h"
#include "compute/formats/grid_table.h"

namespace dflash::compute {

// Reads 32 inputs of one vector of outputs.
template <class V, WeightFormat kFormat>
struct GridCodes {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr PanelLayout kLayout = panel_layout(kFormat);
  static constexpr GridFacts kGrid = grid_facts(kFormat);
  static constexpr size_t kWidth = 2 * V::kLanes;
  static constexpr bool kIsIq3 = kGrid.entry_words == 1;
  static constexpr uint32_t kIndexWords = 2 / kGrid.entry_words;
  static constexpr bool kHasEverySign =
      kFormat == WeightFormat::kIq3S || kFormat == WeightFormat::kIq2S;
  // Whether each 16 inputs have a scale of their own.
  static constexpr bool kHasTwoScales =
      kFormat == WeightFormat::kIq2Xs || kFormat == WeightFormat::kIq2S;
  // A weight is a code times d * (1 + 2 * scale) times this.
  static constexpr float kUnit = kFormat == WeightFormat::kIq3S     ? 1.0f
                                 : kFormat == WeightFormat::kIq3Xxs ? 0.25f
                                                                    : 0.125f;

  // What 32 inputs share.
  struct Group {
    I indices[kIndexWords];
    I signs;
    I upper;   // the bits of indices above the eighth
    I scales;  // iq3_s: 1 + 2 * scale; otherwise the scale, or two of them in nibbles
    F unit;    // d * kUnit
  };
  // The codes of eight inputs.
  struct Octet {
    I words[2];
  };

  // Opens group `group` of a record for lanes [half * kLanes, (half + 1) * kLanes).
  [[gnu::always_inline]] static inline Group open(const uint8_t* record, uint32_t group, int half) {
    const size_t lane = static_cast<size_t>(half) * V::kLanes;
    const uint8_t* at = record + (kLayout.header_bytes + group * kLayout.group_bytes()) * kWidth;
    const uint8_t* words = at + kLayout.scale_bytes * kWidth + 4 * lane;
    Group found;
    for (uint32_t w = 0; w < kIndexWords; ++w)
      found.indices[w] = V::load_words(words + 4 * w * kWidth);
    const I stored = V::load_words(words + 4 * kIndexWords * kWidth);
    const I spare = V::shift_right(stored, 28);
    found.signs = kHasEverySign ? stored : all_signs(stored);
    found.upper = spare;
    found.scales = spare;
    if constexpr (kLayout.scale_bytes >= 1) found.scales = V::widen_u8(at + lane);
    if constexpr (kLayout.scale_bytes == 2) found.upper = V::widen_u8(at + kWidth + lane);
    found.unit = V::mul(V::load_f16(record + 2 * lane), V::set1(kUnit));
    return found;
  }

  // The scale of inputs [16 * sixteen, 16 * sixteen + 16) of the group. All products are exact.
  [[gnu::always_inline]] static inline F scale(const Group& group, uint32_t sixteen) {
    I odd = group.scales;
    if constexpr (kHasTwoScales) odd = V::shift_right(odd, 4 * sixteen) & V::set1i(15);
    if constexpr (kFormat != WeightFormat::kIq3S) odd = V::shift_left(odd, 1) | V::set1i(1);
    return V::mul(group.unit, V::to_float(odd));
  }

  // The codes of inputs [8 * octet, 8 * octet + 8) of the group.
  [[gnu::always_inline]] static inline Octet octet(const Group& group, uint32_t octet) {
    Octet found;
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t* grid = kGridTable.words + kGrid.first_word;
      I word;
      if constexpr (kIsIq3) {
        // The indices of this octet are two bytes of one word, and its ninth bits lie together.
        const I both = V::shift_right(octet < 2 ? group.indices[0] : group.indices[kIndexWords - 1],
                                      octet % 2 * 16 + 8 * h);
        I entry = both & V::set1i(255);
        if constexpr (kFormat == WeightFormat::kIq3S) {
          entry = entry |
                  (V::shift_left(V::shift_right(group.upper, 2 * octet + h), 8) & V::set1i(256));
        }
        word = V::gather(grid, entry);
      } else {
        I entry = V::shift_right(group.indices[0], 8 * octet) & V::set1i(255);
        if constexpr (kFormat == WeightFormat::kIq2Xs) {
          entry = entry | (V::shift_left(V::shift_right(group.upper, octet), 8) & V::set1i(256));
        } else if constexpr (kFormat == WeightFormat::kIq2S) {
          entry =
              entry | (V::shift_left(V::shift_right(group.upper, 2 * octet), 8) & V::set1i(768));
        }
        word = V::gather(grid + h, V::shift_left(entry, 1));
      }
      found.words[h] = with_signs(word, V::shift_right(group.signs, 4 * h + octet));
    }
    return found;
  }

 private:
  // Fills in the signs that follow from the seven others of their octets: the number of negative
  // inputs is even.
  [[gnu::always_inline]] static inline I all_signs(I stored) {
    const I known = stored & V::set1i(0x0fffffff);
    I odd = known ^ V::shift_right(known, 16);
    odd = odd ^ V::shift_right(odd, 8);
    odd = odd ^ V::shift_right(odd, 4);
    return known | V::shift_left(odd, 28);
  }

  // Negates those bytes of `word` where bit 0 of the same byte of `signs` is set. No byte is zero,
  // so that adding one to the inverted byte carries nothing into the next.
  [[gnu::always_inline]] static inline I with_signs(I word, I signs) {
    const I ones = signs & V::set1i(0x01010101);
    const I inverted = word ^ V::subi(V::shift_left(ones, 8), ones);
    return V::addi(inverted, ones);
  }
};

// The weights of a format with a grid, in the form that quantized_formats.h describes:
// code * scale.
template <class V, WeightFormat kFormat>
struct GridFormat {
  using F = typename V::F;
  using I = typename V::I;
  using Codes = GridCodes<V, kFormat>;
  static constexpr uint32_t kStep = 8;
  struct Group {
    typename Codes::Group halves[2];
    F scale[2];
  };
  struct Step {
    typename Codes::Octet halves[2];
    F scale[2];
  };
  [[gnu::always_inline]] static inline Group open(const uint8_t* record, uint32_t group) {
    Group found;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      found.halves[h] = Codes::open(record, group, h);
      found.scale[h] = Codes::scale(found.halves[h], 0);
    }
    return found;
  }
  [[gnu::always_inline]] static inline Step step(const Group& group, uint32_t s) {
    Step found;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      found.halves[h] = Codes::octet(group.halves[h], s);
      found.scale[h] = Codes::kHasTwoScales ? Codes::scale(group.halves[h], s / 2) : group.scale[h];
    }
    return found;
  }
  [[gnu::always_inline]] static inline void weights(const Group&, const Step& step, uint32_t j,
                                                    F* pair) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const I word = step.halves[h].words[j / 4];
      pair[h] = V::mul(V::to_float(V::shift_right_signed(V::shift_left(word, 24 - j % 4 * 8), 24)),
                       step.scale[h]);
    }
  }
};

}  // namespace dflash::compute

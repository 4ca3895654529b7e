// Moves the fields of quantised weights into a panel (panel_layout.h). One output's record at a
// time is taken apart into arrays, then the arrays of four outputs go into the panel together, so
// that a store covers four outputs instead of one. Written with portable vectors, as transpose.h
// is.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "compute/cpu/panels/panel_layout.h"
#include "compute/cpu/panels/transpose.h"

namespace dflash::compute {

// Outputs that are stored together; the last ones of a panel may be fewer.
inline constexpr uint32_t kQuad = 4;

namespace internal {
using U8x16 = uint8_t __attribute__((vector_size(16)));

// Returns the bytes at even places of two vectors, those of `a` first.
inline U8x16 even_bytes(U16x8 a, U16x8 b) {
  return __builtin_shufflevector(reinterpret_cast<U8x16>(a), reinterpret_cast<U8x16>(b), 0, 2, 4, 6,
                                 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
}  // namespace internal

// Takes the nibbles at bit `shift` (0 or 4) of sixteen bytes and joins each two of them to a byte,
// which lies in the lower half of its 16-bit lane. The first nibble becomes the low one.
inline internal::U16x8 join_nibbles(internal::U16x8 bytes, int shift) {
  const internal::U16x8 nibbles = (bytes >> shift) & 0x0f0f;
  return nibbles | nibbles >> 4;
}
// Does the same with bit pairs: those of bytes 2b and 2b + 1 become the low nibble of byte b.
inline internal::U16x8 join_pairs(internal::U16x8 bytes, int shift) {
  const internal::U16x8 pairs = (bytes >> shift) & 0x0303;
  return (pairs | pairs >> 6) & 0x000f;
}

// The type of one scale of a group. Formats with a scale and a minimum have two values of it.
template <WeightFormat kFormat>
using ScaleOf = std::conditional_t<
    kFormat == WeightFormat::kInt8G32 || kFormat == WeightFormat::kInt4G32 ||
        kFormat == WeightFormat::kFp8E4m3B128 || kFormat == WeightFormat::kInt4Zp,
    uint32_t,
    std::conditional_t<kFormat == WeightFormat::kQ8_0 || kFormat == WeightFormat::kQ4_0 ||
                           kFormat == WeightFormat::kIq4Nl || kFormat == WeightFormat::kQ4_1 ||
                           kFormat == WeightFormat::kQ5_0 || kFormat == WeightFormat::kQ5_1,
                       uint16_t, uint8_t>>;

// The fields of one record of one output, in the order in which the panel has them.
template <WeightFormat kFormat>
struct RecordFields {
  static constexpr PanelLayout kLayout = panel_layout(kFormat);
  static constexpr uint32_t kGroups = kLayout.record_inputs / kLayout.group_inputs;
  static constexpr uint32_t kHeaders = kLayout.header_bytes / 2;
  static constexpr uint32_t kScales = kLayout.scale_bytes / sizeof(ScaleOf<kFormat>);  // per group
  static constexpr bool kHasFurther =
      has_fifth_bit(kFormat) || kFormat == WeightFormat::kQ6K || kFormat == WeightFormat::kQ3K;
  using Further = std::conditional_t<kFormat == WeightFormat::kQ3K, uint16_t, uint32_t>;
  // Words of codes per group, without the further bits.
  static constexpr uint32_t kWords = (kLayout.code_bytes - (kHasFurther ? sizeof(Further) : 0)) / 4;

  alignas(16) uint32_t words[kGroups * kWords];
  alignas(16) Further further[kGroups < 4 ? 4 : kGroups];  // four at least, as they are stored
  ScaleOf<kFormat> scales[kScales == 0 ? 1 : kGroups * kScales];
  uint16_t headers[kHeaders == 0 ? 1 : kHeaders];

  // Byte offsets per output: of a group within its record, and of the group's words.
  static constexpr size_t group_at(uint32_t group) {
    return kLayout.header_bytes + group * kLayout.group_bytes();
  }
  static constexpr size_t words_at(uint32_t group) { return group_at(group) + kLayout.scale_bytes; }
};

// Stores the same field of `lanes` neighbouring outputs to `to`, where the field's array holds the
// first of them. `lanes` is four except at the end of a narrow panel; the compiler sees the
// constant.
template <class T>
void store_lanes(std::byte* to, const T* four, uint32_t lanes) {
  if (lanes == kQuad)
    std::memcpy(to, four, sizeof(T) * kQuad);
  else
    std::memcpy(to, four, sizeof(T) * lanes);
}
template <class T>
void store_quad(std::byte* to, uint32_t lanes, T a, T b, T c, T d) {
  // The values are joined in a register: an array that is written in parts and then read whole
  // stalls on store forwarding.
  if (sizeof(T) < 4 && lanes == kQuad) {
    constexpr int kBits = 8 * sizeof(T) % 32;
    const uint64_t four =
        uint64_t{a} | uint64_t{b} << kBits | uint64_t{c} << 2 * kBits | uint64_t{d} << 3 * kBits;
    std::memcpy(to, &four, sizeof(T) * kQuad % 16);
    return;
  }
  const T four[kQuad] = {a, b, c, d};
  store_lanes(to, four, lanes);
}

// Stores records of `lanes` outputs; `lanes` is a constant after inlining, but for narrow panels.
template <WeightFormat kFormat>
inline void store_some_records(const RecordFields<kFormat>* from, uint32_t lanes, uint32_t width,
                               uint32_t output, std::byte* record) {
  using Fields = RecordFields<kFormat>;
  const auto place = [&](size_t field_at, size_t element) {
    return record + field_at * width + element * output;
  };
  for (uint32_t h = 0; h < Fields::kHeaders; ++h) {
    store_quad(place(h * sizeof(uint16_t), 2), lanes, from[0].headers[h], from[1].headers[h],
               from[2].headers[h], from[3].headers[h]);
  }
  using Scale = ScaleOf<kFormat>;
  for (uint32_t group = 0; group < Fields::kGroups; ++group) {
    for (uint32_t i = 0; i < Fields::kScales; ++i) {
      const uint32_t s = group * Fields::kScales + i;
      store_quad(place(Fields::group_at(group) + i * sizeof(Scale), sizeof(Scale)), lanes,
                 from[0].scales[s], from[1].scales[s], from[2].scales[s], from[3].scales[s]);
    }
  }
  alignas(16) uint32_t tile[4 * kQuad];
  for (uint32_t first = 0; first < Fields::kGroups * Fields::kWords; first += 4) {
    const uint32_t* const rows[kQuad] = {from[0].words + first, from[1].words + first,
                                         from[2].words + first, from[3].words + first};
    transpose_tile(rows, tile, kQuad);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t group = (first + i) / Fields::kWords, word = (first + i) % Fields::kWords;
      store_lanes(place(Fields::words_at(group) + 4 * size_t{word}, 4), tile + kQuad * i, lanes);
    }
  }
  if constexpr (kFormat == WeightFormat::kQ3K) {
    for (uint32_t group = 0; group < Fields::kGroups; ++group) {
      store_quad(place(Fields::words_at(group) + 4 * size_t{Fields::kWords}, 2), lanes,
                 from[0].further[group], from[1].further[group], from[2].further[group],
                 from[3].further[group]);
    }
  } else if constexpr (Fields::kHasFurther) {
    for (uint32_t group = 0; group < Fields::kGroups; group += 4) {
      const uint32_t* const rows[kQuad] = {from[0].further + group, from[1].further + group,
                                           from[2].further + group, from[3].further + group};
      transpose_tile(rows, tile, kQuad);
      for (uint32_t i = 0; i < 4 && group + i < Fields::kGroups; ++i) {
        store_lanes(place(Fields::words_at(group + i) + 4 * size_t{Fields::kWords}, 4),
                    tile + kQuad * i, lanes);
      }
    }
  }
}

// Stores four records into the lanes from `output` on (a multiple of four) of a panel's record, or
// as many as the panel has lanes left.
template <WeightFormat kFormat>
void store_records(const RecordFields<kFormat>* from, uint32_t width, uint32_t output,
                   std::byte* record) {
  if (width - output >= kQuad)
    return store_some_records<kFormat>(from, kQuad, width, output, record);
  store_some_records<kFormat>(from, width - output, width, output, record);
}

// Stores `count` bytes of each of four outputs to the lanes from `output` on of a panel's codes,
// which lie as [input][output].
inline void store_bytes(const uint8_t* const* from, uint32_t count, uint32_t width, uint32_t output,
                        std::byte* codes) {
  using internal::U8x16;
  const uint32_t lanes = width - output < kQuad ? width - output : kQuad;
  std::byte* to = codes + output;
  uint32_t i = 0;
  for (; lanes == kQuad && i + 16 <= count; i += 16) {
    U8x16 rows[kQuad], pairs[4];
    for (uint32_t o = 0; o < kQuad; ++o) rows[o] = internal::load_vector<U8x16>(from[o] + i);
    for (uint32_t p = 0; p < 2; ++p) {
      const U8x16 a = rows[2 * p], b = rows[2 * p + 1];
      pairs[p] =
          __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      pairs[2 + p] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                             30, 15, 31);
    }
    uint32_t steps[16];  // word i holds input i of the four outputs
    for (uint32_t half = 0; half < 2; ++half) {
      const auto a = reinterpret_cast<internal::U16x8>(pairs[2 * half]),
                 b = reinterpret_cast<internal::U16x8>(pairs[2 * half + 1]);
      internal::store_vector(steps + 8 * half, internal::low16(a, b));
      internal::store_vector(steps + 8 * half + 4, internal::high16(a, b));
    }
    for (uint32_t step = 0; step < 16; ++step, to += width) std::memcpy(to, steps + step, kQuad);
  }
  for (; i < count; ++i, to += width)
    store_quad(to, lanes, from[0][i], from[1][i], from[2][i], from[3][i]);
}

}  // namespace dflash::compute

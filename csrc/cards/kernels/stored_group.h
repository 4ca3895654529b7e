// A group of 32 weights in registers, in the form that a record holds it (record_layout.h). This is
// what a thread loads ahead while it works on the groups before: it takes a fraction of the
// registers that the decoded values would. decode.h makes floats of it a few at a time, and
// int8_codes.h makes integers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"
#include "cards/record_layout.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kGroup = 32;
inline constexpr uint32_t kGroupWords = kGroup / 4;  // words of a group's codes, a byte per code

// One lane's record. Its unit u lies u * 512 bytes further, because the 32 lanes' units of 16 bytes
// are interleaved.
struct Record {
  const unsigned char* first;
  GPU_FN Unit unit(uint32_t index) const {
    return load_device_16<Unit>(first + uint64_t{index} * (kUnitBytes * kPanelWidth));
  }
  GPU_FN uint32_t word(uint32_t unit_index, uint32_t index) const {
    return load_device_word(first + uint64_t{unit_index} * (kUnitBytes * kPanelWidth) + 4 * index);
  }
};

DFLASH_GPU_BOTH constexpr bool is_nibbles(WeightFormat format) {
  return format == WeightFormat::kInt4G32 || format == WeightFormat::kQ4_0 ||
         format == WeightFormat::kIq4Nl || format == WeightFormat::kIq4Xs ||
         format == WeightFormat::kMxfp4 || format == WeightFormat::kGgufMxfp4 ||
         format == WeightFormat::kQ4_1 || format == WeightFormat::kQ5_0 ||
         format == WeightFormat::kQ5_1 || format == WeightFormat::kInt4Zp;
}
// Whether a word of fifth bits belongs to a group's nibbles; bit i is input i's.
DFLASH_GPU_BOTH constexpr bool has_fifth_word(WeightFormat format) {
  return format == WeightFormat::kQ5_0 || format == WeightFormat::kQ5_1;
}
// Whether the group has d and m in one word, and its weights are d * code + m.
DFLASH_GPU_BOTH constexpr bool has_added_minimum(WeightFormat format) {
  return format == WeightFormat::kQ4_1 || format == WeightFormat::kQ5_1;
}
// Whether the format has a minimum beside its scale, and two groups' codes in the same bytes.
DFLASH_GPU_BOTH constexpr bool is_k_affine(WeightFormat format) {
  return format == WeightFormat::kQ4K || format == WeightFormat::kQ5K;
}

// Whether scales belong to 16 inputs, so that a group has two of them.
DFLASH_GPU_BOTH constexpr bool has_half_scales(WeightFormat format) {
  return format == WeightFormat::kQ6K || format == WeightFormat::kQ3K ||
         format == WeightFormat::kQ2K;
}

// How many units of codes a group takes (for q4_k and q5_k the record's head included), and how
// many words of scales.
DFLASH_GPU_BOTH constexpr uint32_t group_units(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:  return 8;
    case WeightFormat::kQ3K:
    case WeightFormat::kQ5K:  return 5;
    case WeightFormat::kF16:
    case WeightFormat::kBF16:
    case WeightFormat::kQ6K:  return 4;
    case WeightFormat::kQ4K:  return 3;
    default:                  return is_nibbles(format) ? 1 : 2;
  }
}
DFLASH_GPU_BOTH constexpr uint32_t group_scale_words(WeightFormat format) {
  if (format == WeightFormat::kF32 || format == WeightFormat::kF16 ||
      format == WeightFormat::kBF16 || format == WeightFormat::kQ3K || is_k_affine(format))
    return 0;
  return format == WeightFormat::kQ6K || format == WeightFormat::kQ2K ||
                 format == WeightFormat::kIq4Xs || has_fifth_word(format)
             ? 2
             : 1;
}

// How many groups a thread can load ahead in so many registers; one at least.
DFLASH_GPU_BOTH constexpr uint32_t groups_ahead(WeightFormat format, uint32_t registers,
                                                uint32_t most) {
  const uint32_t count = registers / (4 * group_units(format) + group_scale_words(format));
  return count < 1 ? 1 : count > most ? most : count;
}

template <WeightFormat kFormat>
struct StoredGroup {
  Unit units[group_units(kFormat)];
  uint32_t scales[2];  // group_scale_words() of them, as they lie in memory
};

GPU_FN uint32_t half_of(uint32_t word, uint32_t index) {
  return word >> (index % 2 * 16) & 0xffffu;
}
GPU_FN uint32_t byte_of(uint32_t word, uint32_t index) { return word >> (index % 4 * 8) & 0xffu; }

// Loads group `group` of a record. These are loads alone, so that nothing waits for them here.
template <WeightFormat kFormat>
GPU_FN StoredGroup<kFormat> load_group(const Record& record, uint32_t group) {
  StoredGroup<kFormat> stored{};
  if constexpr (is_k_affine(kFormat)) {
    constexpr uint32_t kNibbles = kFormat == WeightFormat::kQ5K ? 3 : 1;
    GPU_UNROLL
    for (uint32_t u = 0; u < 2; ++u) stored.units[u] = record.unit(kNibbles + group / 2 * 2 + u);
    GPU_UNROLL
    for (uint32_t u = 0; u < kNibbles; ++u) stored.units[2 + u] = record.unit(u);
  } else if constexpr (kFormat == WeightFormat::kQ6K) {
    GPU_UNROLL
    for (uint32_t u = 0; u < 2; ++u) {
      stored.units[u] = record.unit(group / 4 * 4 + group % 2 * 2 + u);
      stored.units[2 + u] = record.unit(8 + group / 4 * 2 + u);
    }
    stored.scales[0] = record.word(12, group / 2);
    stored.scales[1] = record.word(13, 0);
  } else if constexpr (kFormat == WeightFormat::kQ3K) {
    GPU_UNROLL
    for (uint32_t u = 0; u < 2; ++u) {
      stored.units[u] = record.unit(2 + group / 4 * 2 + u);
      stored.units[2 + u] = record.unit(u);
    }
    stored.units[4] = record.unit(6);
  } else if constexpr (kFormat == WeightFormat::kQ2K) {
    GPU_UNROLL
    for (uint32_t u = 0; u < 2; ++u) stored.units[u] = record.unit(1 + group / 4 * 2 + u);
    stored.scales[0] = record.word(0, group / 2);
    stored.scales[1] = record.word(5, 0);
  } else {
    // The scales follow the codes of all groups.
    constexpr uint32_t kUnits = group_units(kFormat), kScales = 8 * kUnits;
    GPU_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) stored.units[u] = record.unit(group * kUnits + u);
    if constexpr (kFormat == WeightFormat::kInt8G32 || kFormat == WeightFormat::kInt4G32 ||
                  kFormat == WeightFormat::kInt4Zp) {
      stored.scales[0] = record.word(kScales + group / 4, group % 4);
    } else if constexpr (kFormat == WeightFormat::kIq4Xs) {
      stored.scales[0] = record.word(kScales, 0);
      stored.scales[1] = record.word(kScales, 1);
    } else if constexpr (kFormat == WeightFormat::kQ8_0 || kFormat == WeightFormat::kQ4_0 ||
                         kFormat == WeightFormat::kIq4Nl) {
      stored.scales[0] = record.word(kScales, group / 2);
    } else if constexpr (kFormat == WeightFormat::kQ5_0) {
      stored.scales[0] = record.word(kScales + 2, group / 2);
      stored.scales[1] = record.word(kScales + group / 4, group % 4);
    } else if constexpr (kFormat == WeightFormat::kQ5_1) {
      stored.scales[0] = record.word(kScales + 2 + group / 4, group % 4);
      stored.scales[1] = record.word(kScales + group / 4, group % 4);
    } else if constexpr (kFormat == WeightFormat::kQ4_1) {
      stored.scales[0] = record.word(kScales + group / 4, group % 4);
    } else if constexpr (group_scale_words(kFormat) !=
                         0) {  // fp8_e4m3_b128's floats, mxfp4's exponents
      stored.scales[0] = record.word(kScales, group / 4);
    }
  }
  return stored;
}

// Four neighbouring codes of a group, those of inputs [4 * word, 4 * word + 4), as unsigned bytes.
// The floating formats have none.
template <WeightFormat kFormat>
GPU_FN uint32_t code_word(const StoredGroup<kFormat>& stored, uint32_t group, uint32_t word) {
  if constexpr (is_nibbles(kFormat)) {
    const uint32_t nibbles = stored.units[0].words[word % 4] >> (word / 4 * 4) & 0x0f0f0f0fu;
    if constexpr (!has_fifth_word(kFormat)) return nibbles;
    // The product copies four bits to the lowest ones of four bytes: bit i * 8 is bit i moved by
    // 7i.
    const uint32_t fifth = stored.scales[1] >> (4 * word) & 15u;
    return nibbles | (fifth * 0x00204081u & 0x01010101u) << 4;
  } else if constexpr (is_k_affine(kFormat)) {
    uint32_t codes = stored.units[word / 4].words[word % 4] >> (group % 2 * 4) & 0x0f0f0f0fu;
    if constexpr (kFormat == WeightFormat::kQ5K)
      codes |= (stored.units[3 + word / 4].words[word % 4] >> group & 0x01010101u) << 4;
    return codes;
  } else if constexpr (kFormat == WeightFormat::kQ3K || kFormat == WeightFormat::kQ2K) {
    uint32_t codes = stored.units[word / 4].words[word % 4] >> (group % 4 * 2) & 0x03030303u;
    if constexpr (kFormat == WeightFormat::kQ3K)
      codes |= (stored.units[2 + word / 4].words[word % 4] >> group & 0x01010101u) << 2;
    return codes;
  } else if constexpr (kFormat == WeightFormat::kQ6K) {  // bit pair group % 4 of half group / 4
    const uint32_t low = stored.units[word / 4].words[word % 4],
                   high = stored.units[2 + word / 4].words[word % 4];
    return (low >> (group % 4 / 2 * 4) & 0x0f0f0f0fu) | (high >> (group % 4 * 2) & 0x03030303u)
                                                            << 4;
  } else {
    return stored.units[word / 4].words[word % 4];
  }
}

}  // namespace dflash::compute::gpu

// Groups of 32 weights of a record in the form that class int8-groups multiplies: signed bytes,
// four inputs to a word in ascending order, the factor of the group (of each half in q6_k), and its
// offset where the format has one. Bytes are computed four at a time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/decode.h"

namespace dflash::compute::gpu {

// How many scales a group has, and how many offsets where it has any.
DFLASH_GPU_BOTH constexpr uint32_t group_parts(WeightFormat format) {
  return has_half_scales(format) ? 2 : 1;
}
DFLASH_GPU_BOTH constexpr bool has_offset(WeightFormat format) {
  return is_k_affine(format) || has_added_minimum(format) || format == WeightFormat::kQ2K ||
         format == WeightFormat::kInt4Zp;
}

// Whether each half of a group has an offset of its own, a factor of the sum of 16 codes of a row.
DFLASH_GPU_BOTH constexpr bool has_half_offsets(WeightFormat format) {
  return has_offset(format) && group_parts(format) == 2;
}

struct Int8Group {
  uint32_t words[kGroupWords];
  float scales[2];
  float offsets[2];  // 0 - offset: a factor of the sum of the row's codes
};

// Subtracts `bias`, at most 128, from each of four bytes in 0..127.
GPU_FN uint32_t less_bias(uint32_t bytes, uint32_t bias) {
  return ((bytes | 0x80808080u) - bias * 0x01010101u) ^ 0x80808080u;
}

GPU_FN LevelTable doubled_e2m1() {
  return {
      {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}
  };
}

// Makes signed bytes of four codes of a stored group.
template <WeightFormat kFormat>
GPU_FN uint32_t signed_codes(uint32_t codes) {
  if constexpr (kFormat == WeightFormat::kInt4G32 || kFormat == WeightFormat::kQ4_0)
    return less_bias(codes, 8);
  else if constexpr (kFormat == WeightFormat::kQ5_0)
    return less_bias(codes, 16);
  else if constexpr (kFormat == WeightFormat::kQ3K)
    return less_bias(codes, 4);
  else if constexpr (kFormat == WeightFormat::kQ6K)
    return less_bias(codes, 32);
  else if constexpr (kFormat == WeightFormat::kIq4Nl || kFormat == WeightFormat::kIq4Xs)
    return iq4_levels()(codes);
  else if constexpr (kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kGgufMxfp4)
    return doubled_e2m1()(codes);
  else
    return codes;
}

// Makes of a stored group, number `index` of its record, what is multiplied.
template <WeightFormat kFormat>
GPU_FN Int8Group codes_of(const StoredGroup<kFormat>& stored, uint32_t index) {
  Int8Group group{};
  const GroupScale scale = group_scale<kFormat>(stored, index);
  group.scales[0] = scale.factors[0];
  group.scales[1] = scale.factors[1];
  if constexpr (has_offset(kFormat)) {
    group.offsets[0] = sub(0.0f, scale.offsets[0]);
    group.offsets[1] = sub(0.0f, scale.offsets[1]);
  }
  GPU_UNROLL
  for (uint32_t w = 0; w < kGroupWords; ++w)
    group.words[w] = signed_codes<kFormat>(code_word<kFormat>(stored, index, w));
  return group;
}

// Loads the weights of inputs [32 * index, 32 * index + 32) of a record and makes of them what is
// multiplied.
template <WeightFormat kFormat>
GPU_FN void read_codes(const Record& record, uint32_t index, Int8Group& group) {
  group = codes_of<kFormat>(load_group<kFormat>(record, index), index);
}

}  // namespace dflash::compute::gpu

// Encodes rows for class f16-dot2: codes in f16 and a power of two per 32 inputs, stored as records
// (record_layout.h). A request's rows are read as they arrived, intermediate rows as gate and up
// wrote them. What the power of two is for is said in dot2_codes.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/dot2_codes.h"
#include "cards/kernels/int8_rows.h"

namespace dflash::compute::gpu {

using HalfRecord = CodeRecord<4>;
static_assert(kHalfRecordBytes == HalfRecord::kRecordUnits * kUnitBytes);

struct alignas(8) HalfPairs {
  uint32_t words[2];
};

// The scaled sums of the two halves of a group, of which a record has only the whole's, added pair
// by pair as the whole's are.
GPU_FN void scaled_half_sums(const HalfRecord& row, uint32_t index, float* sums) {
  GPU_UNROLL
  for (uint32_t p = 0; p < 2; ++p) {
    float pairs[8];
    GPU_UNROLL
    for (uint32_t u = 0; u < 2; ++u) {
      const Unit codes = load_device_16<Unit>(row.codes(index) + (2 * p + u) * kUnitBytes);
      GPU_UNROLL
      for (uint32_t w = 0; w < 4; ++w)
        pairs[4 * u + w] = add(low_half(codes.words[w]), high_half(codes.words[w]));
    }
    GPU_UNROLL
    for (uint32_t width = 4; width > 0; width /= 2) {
      GPU_UNROLL
      for (uint32_t i = 0; i < width; ++i) pairs[i] = add(pairs[2 * i], pairs[2 * i + 1]);
    }
    sums[p] = mul(row.scale(index), pairs[0]);
  }
}

// The sum of a group's codes. A thread adds its four as (0 + 1) + (2 + 3); then the sums of
// neighbouring threads are added pair by pair.
GPU_KERNEL(dflash_halve_rows, QuantizeParams, kElementThreads) {
  const RowPart part = read_part(params);
  const HalfScale by = half_scale(part.magnitude);
  HalfPairs codes{};
  if (by.inverse > 0.0f) {
    codes.words[0] = half_pair(mul(part.values[0], by.inverse), mul(part.values[1], by.inverse));
    codes.words[1] = half_pair(mul(part.values[2], by.inverse), mul(part.values[3], by.inverse));
  }
  float sum = add(add(low_half(codes.words[0]), high_half(codes.words[0])),
                  add(low_half(codes.words[1]), high_half(codes.words[1])));
  for (uint32_t step = 1; step < kGroupThreads; step *= 2)
    sum = add(sum, float_of(shuffle(bits_of(sum), lane_index() ^ step)));
  if (part.row >= params.num_rows) return;
  unsigned char* const to = params.records + part.record * kHalfRecordBytes;
  *reinterpret_cast<HalfPairs*>(to + 2 * part.place) = codes;
  store_scales(part, reinterpret_cast<float*>(to + 2 * kChain), by.scale, mul(by.scale, sum));
}

}  // namespace dflash::compute::gpu

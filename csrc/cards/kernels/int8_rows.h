// Encodes rows for class int8-groups: codes, and a scale per 32 inputs, with the bits of
// compute/cpu/kernels/int8_rows.h, stored as records (record_layout.h). A request's rows are read
// as they arrived, intermediate rows as gate and up wrote them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernel_params.h"
#include "cards/kernels/convert_floats.h"
#include "cards/kernels/elements.h"
#include "cards/kernels/project.h"
#include "cards/record_layout.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kCodesPerThread = 4;
// Neighbouring threads that share a group.
inline constexpr uint32_t kGroupThreads = 32 / kCodesPerThread;
inline constexpr uint32_t kRecordThreads = kChain / kCodesPerThread;  // and a record
// 1.5 * 2^23: adding it rounds a value to an integer, which is then in the low bits.
inline constexpr float kIntegerShift = 12582912.0f;
inline constexpr int32_t kIntegerShiftBits = 0x4b400000;
static_assert(kElementThreads % kRecordThreads == 0);

// A record of a row of codes as kernels read it, with `kUnits` units of codes per group of 32
// inputs. Its place is counted in units of 16 bytes and in 32 bits, which saves the few-row kernels
// registers and reaches 64 GiB of records.
template <uint32_t kUnits>
struct CodeRecord {
  static constexpr uint32_t kScaleUnit = kChain / 32 * kUnits;
  static constexpr uint32_t kRecordUnits = kScaleUnit + 4;  // in all: scales and scaled sums follow
  const unsigned char* records;
  uint32_t unit;
  GPU_FN const unsigned char* at(uint32_t offset) const {
    return records + uint64_t{unit + offset} * kUnitBytes;
  }
  GPU_FN const unsigned char* codes(uint32_t group) const { return at(kUnits * group); }
  GPU_FN float scale(uint32_t group) const {
    return reinterpret_cast<const float*>(at(kScaleUnit))[group];
  }
  GPU_FN float scaled_sum(uint32_t group) const {
    return reinterpret_cast<const float*>(at(kScaleUnit + 2))[group];
  }
  // The record of chain 0 in the row of a slot.
  GPU_FN static uint32_t first_unit(const ProjectionParams& params, uint32_t slot) {
    return row_of(params, slot) * num_chains(params.num_inputs) * kRecordUnits;
  }
};
using Int8Record = CodeRecord<2>;
inline constexpr uint32_t kInt8RecordUnits = Int8Record::kRecordUnits;
static_assert(kInt8RecordBytes == kInt8RecordUnits * kUnitBytes);

GPU_FN uint32_t row_unit(const ProjectionParams& params, uint32_t slot) {
  return Int8Record::first_unit(params, slot);
}

GPU_FN float read_element(const QuantizeParams& params, uint64_t index) {
  // volatile: the source may change under us, and must not be read a second time.
  if (params.dtype == Dtype::kF32)
    return float_of(static_cast<const volatile uint32_t*>(params.source)[index]);
  return widen_16(params.dtype, static_cast<const volatile uint16_t*>(params.source)[index]);
}

GPU_FN int32_t int8_code(float value, float scale) {
  const int32_t code =
      static_cast<int32_t>(bits_of(add(div(value, scale), kIntegerShift))) - kIntegerShiftBits;
  // A subnormal scale is rounded so coarsely that quotients reach 190.
  return code < -127 ? -127 : code > 127 ? 127 : code;
}

// What a thread encodes: four neighbouring inputs. A group has 8 threads, a record 64. Inputs
// beyond the row's end are zeros.
struct RowPart {
  uint64_t record, row;
  uint32_t place;  // of the first input in the record
  float values[kCodesPerThread] = {};
  // The bits of the group's largest magnitude. As integers, magnitudes have the order of their
  // values, with infinity and NaN above all others.
  uint32_t magnitude = 0;
};
GPU_FN RowPart read_part(const QuantizeParams& params) {
  const uint32_t records = num_chains(params.row_size);
  RowPart part;
  part.record = flat_index() / kRecordThreads;
  part.row = part.record / records;
  part.place = thread_index() % kRecordThreads * kCodesPerThread;
  const uint32_t input = static_cast<uint32_t>(part.record % records) * kChain + part.place;
  GPU_UNROLL
  for (uint32_t i = 0; i < kCodesPerThread; ++i) {
    if (part.row < params.num_rows && input + i < params.row_size)
      part.values[i] = read_element(params, part.row * params.source_stride + input + i);
    const uint32_t bits = bits_of(part.values[i]) & 0x7fffffffu;
    part.magnitude = bits > part.magnitude ? bits : part.magnitude;
  }
  for (uint32_t step = 1; step < kGroupThreads; step *= 2) {
    const uint32_t other = shuffle(part.magnitude, lane_index() ^ step);
    part.magnitude = other > part.magnitude ? other : part.magnitude;
  }
  return part;
}
// Writes a group's scale and scaled sum; its first thread calls it. The record's scales begin at
// `scales`.
GPU_FN void store_scales(const RowPart& part, float* scales, float scale, float scaled_sum) {
  if (lane_index() % kGroupThreads != 0) return;
  scales[part.place / 32] = scale;
  scales[part.place / 32 + kChain / 32] = scaled_sum;
}

// The scaled sums of the two halves of a group, of which a record has only the whole's.
GPU_FN void scaled_half_sums(const Int8Record& row, uint32_t index, float* sums) {
  GPU_UNROLL
  for (uint32_t p = 0; p < 2; ++p) {
    const Unit codes = load_device_16<Unit>(row.codes(index) + p * kUnitBytes);
    int32_t sum = 0;
    GPU_UNROLL
    for (uint32_t w = 0; w < 4; ++w) sum = dot4(codes.words[w], 0x01010101u, sum);
    sums[p] = mul(row.scale(index), static_cast<float>(sum));
  }
}

GPU_KERNEL(dflash_quantize_rows, QuantizeParams, kElementThreads) {
  const RowPart part = read_part(params);
  const float scale =
      part.magnitude < 0x7f800000u ? div(float_of(part.magnitude), 127.0f) : float_of(0x7fc00000u);
  uint32_t codes = 0;
  if (scale > 0.0f) {
    GPU_UNROLL
    for (uint32_t i = 0; i < kCodesPerThread; ++i)
      codes |= (static_cast<uint32_t>(int8_code(part.values[i], scale)) & 0xffu) << (8 * i);
  }
  int32_t sum = dot4(codes, 0x01010101u, 0);
  for (uint32_t step = 1; step < kGroupThreads; step *= 2)
    sum += static_cast<int32_t>(shuffle(static_cast<uint32_t>(sum), lane_index() ^ step));
  if (part.row >= params.num_rows) return;
  unsigned char* const to = params.records + part.record * kInt8RecordBytes;
  *reinterpret_cast<uint32_t*>(to + part.place) = codes;
  store_scales(part, reinterpret_cast<float*>(to + kChain), scale,
               mul(scale, static_cast<float>(sum)));
}

}  // namespace dflash::compute::gpu

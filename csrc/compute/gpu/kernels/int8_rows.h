// Rows of class int8-groups: codes and scales per 32 inputs, the bits of compute/cpu/int8_rows.h, as records (record_layout.h). The request's
// rows come straight from the wire's layout, intermediate rows from gate and up.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernel_params.h"
#include "compute/gpu/kernels/project.h"
#include "compute/gpu/kernels/widen_rows.h"
#include "compute/gpu/record_layout.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kCodesPerThread = 4;
inline constexpr uint32_t kGroupThreads = 32 / kCodesPerThread;          // neighbours that share a group
inline constexpr uint32_t kRecordThreads = kChain / kCodesPerThread;     // and a record
inline constexpr float kIntegerShift = 12582912.0f;                      // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
inline constexpr int32_t kIntegerShiftBits = 0x4b400000;
static_assert(kElementThreads % kRecordThreads == 0);

inline constexpr uint32_t kInt8RecordUnits = kInt8RecordBytes / kUnitBytes;
static_assert(kInt8RecordBytes % kUnitBytes == 0);

// A record of a row as kernels read it. Units are counted in 32 bits, which saves the few-row kernels registers: 64 GiB of records.
struct Int8Record {
  const unsigned char* records;
  uint32_t unit;
  GPU_FN const unsigned char* at(uint32_t offset) const { return records + uint64_t{unit + offset} * kUnitBytes; }
  GPU_FN const unsigned char* codes(uint32_t group) const { return at(2 * group); }
  GPU_FN float scale(uint32_t group) const { return reinterpret_cast<const float*>(at(kChain / kUnitBytes))[group]; }
  GPU_FN float scaled_sum(uint32_t group) const { return reinterpret_cast<const float*>(at(kChain / kUnitBytes + 2))[group]; }
};
// The first unit of a row's records.
GPU_FN uint32_t row_unit(const ProjectionParams& params, uint32_t slot) {
  return row_of(params, slot) * num_chains(params.num_inputs) * kInt8RecordUnits;
}

GPU_FN float read_element(const QuantizeParams& params, uint64_t index) {
  // volatile: the source may change under us, and must not be read a second time.
  if (params.dtype == Dtype::kF32) return float_of(static_cast<const volatile uint32_t*>(params.source)[index]);
  return widen_16(params.dtype, static_cast<const volatile uint16_t*>(params.source)[index]);
}

GPU_FN int32_t int8_code(float value, float scale) {
  const int32_t code = static_cast<int32_t>(bits_of(add(div(value, scale), kIntegerShift))) - kIntegerShiftBits;
  return code < -127 ? -127 : code > 127 ? 127 : code;  // a subnormal scale is rounded so coarsely that quotients reach 190
}

// Four neighbouring inputs a thread; 8 threads a group, 64 a record. Inputs that do not exist are zeros.
GPU_KERNEL(dflash_quantize_rows, QuantizeParams, kElementThreads) {
  const uint64_t record = flat_index() / kRecordThreads;
  const uint32_t records = num_chains(params.row_size);
  const uint64_t row = record / records;
  const uint32_t place = thread_index() % kRecordThreads * kCodesPerThread;
  const uint32_t input = static_cast<uint32_t>(record % records) * kChain + place;
  float values[kCodesPerThread] = {};
  uint32_t magnitude = 0;  // as integers magnitudes keep their order, with infinity and NaN above all
  GPU_UNROLL
  for (uint32_t i = 0; i < kCodesPerThread; ++i) {
    if (row < params.num_rows && input + i < params.row_size) values[i] = read_element(params, row * params.source_stride + input + i);
    const uint32_t bits = bits_of(values[i]) & 0x7fffffffu;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  for (uint32_t step = 1; step < kGroupThreads; step *= 2) {
    const uint32_t other = shuffle(magnitude, lane_index() ^ step);
    magnitude = other > magnitude ? other : magnitude;
  }
  const float scale = magnitude < 0x7f800000u ? div(float_of(magnitude), 127.0f) : float_of(0x7fc00000u);
  uint32_t codes = 0;
  if (scale > 0.0f) {
    GPU_UNROLL
    for (uint32_t i = 0; i < kCodesPerThread; ++i) codes |= (static_cast<uint32_t>(int8_code(values[i], scale)) & 0xffu) << (8 * i);
  }
  int32_t sum = dot4(codes, 0x01010101u, 0);
  for (uint32_t step = 1; step < kGroupThreads; step *= 2) sum += static_cast<int32_t>(shuffle(static_cast<uint32_t>(sum), lane_index() ^ step));
  if (row >= params.num_rows) return;
  unsigned char* const to = params.records + record * kInt8RecordBytes;
  *reinterpret_cast<uint32_t*>(to + place) = codes;
  if (lane_index() % kGroupThreads != 0) return;
  float* const scales = reinterpret_cast<float*>(to + kChain) + place / 32;
  scales[0] = scale;
  scales[kChain / 32] = mul(scale, static_cast<float>(sum));
}

}  // namespace dflash::compute::gpu

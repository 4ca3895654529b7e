// How weights lie in device memory. A record holds the weights of one output for one fma chain (256
// inputs) with their scales, in units of 16 bytes. A panel is 32 outputs. Units u of its 32 records
// lie side by side, so that 32 lanes with an output each read 512 bytes at once. A matrix is its
// panels one after the other, and a panel its chains by ascending inputs. Outputs and inputs that
// do not exist are zeros.
//
// What a record holds, in this order:
//
// - f32, f16, bf16: 256 values.
// - int8_g32: 256 integers of 8 bits, then 8 scales in f32.
// - int4_g32: 8 x 16 bytes of nibbles, then 8 scales in f32.
// - int4_zp: the same; the five lowest bits of a scale are the zero point.
// - fp8_e4m3_b128: 256 codes, then 2 scales in f32.
// - q8_0: 256 integers of 8 bits, then 8 scales d in f16.
// - q4_0, iq4_nl: 8 x 16 bytes of nibbles, then 8 scales d in f16.
// - mxfp4, gguf_mxfp4: 8 x 16 bytes of nibbles, then 8 exponents.
// - iq4_xs: 8 x 16 bytes of nibbles, then ggml's 8 bytes of scales.
// - q4_1: 8 x 16 bytes of nibbles, then 8 pairs of d and m in f16.
// - q5_0, q5_1: as q4_0 and q4_1, with 8 words of fifth bits behind the nibbles.
// - q4_k, q5_k: ggml's block as it is.
// - q6_k: ggml's block as it is, whose d begins the last unit.
// - q3_k, q2_k: ggml's block as it is, filled up with zeros.
//
// Of nibbles, byte i of a group of 32 inputs has input i in the low half and input 16 + i in the
// high half.
//
// The rows that classes int8-groups and f16-dot2 multiply are records too: 256 codes (bytes, or
// f16), then the scale of each group of 32 inputs, then for each group the scale times the sum of
// its codes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cards/kernel_params.h"
#include "compute/formats/weight_format.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kUnitBytes = 16;

#if defined(__CUDACC__) || defined(__HIP__)
#define DFLASH_GPU_BOTH __host__ __device__
#else
#define DFLASH_GPU_BOTH
#endif

DFLASH_GPU_BOTH constexpr uint32_t record_units(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:         return 64;
    case WeightFormat::kF16:
    case WeightFormat::kBF16:        return 32;
    case WeightFormat::kInt8G32:     return 18;
    case WeightFormat::kInt4G32:
    case WeightFormat::kInt4Zp:      return 10;
    case WeightFormat::kFp8E4m3B128:
    case WeightFormat::kQ8_0:        return 17;
    case WeightFormat::kQ5K:         return 11;
    case WeightFormat::kQ6K:         return 14;
    case WeightFormat::kMxfp4:
    case WeightFormat::kQ4_0:
    case WeightFormat::kQ4K:
    case WeightFormat::kGgufMxfp4:
    case WeightFormat::kIq4Nl:
    case WeightFormat::kIq4Xs:       return 9;
    case WeightFormat::kQ4_1:        return 10;
    case WeightFormat::kQ5_0:        return 11;
    case WeightFormat::kQ5_1:        return 12;
    case WeightFormat::kQ3K:         return 7;
    case WeightFormat::kQ2K:         return 6;
    default:                         return 0;
  }
}
// Whether cards have records and kernels for a format.
DFLASH_GPU_BOTH constexpr bool is_card_format(WeightFormat format) {
  return record_units(format) != 0;
}
DFLASH_GPU_BOTH constexpr uint32_t num_chains(uint32_t inputs) {
  return (inputs + kChain - 1) / kChain;
}
DFLASH_GPU_BOTH constexpr uint32_t num_panels(uint32_t outputs) {
  return (outputs + kPanelWidth - 1) / kPanelWidth;
}
// From one chain of a panel to the next, and from one panel to the next.
DFLASH_GPU_BOTH constexpr uint64_t chain_bytes(WeightFormat format) {
  return uint64_t{record_units(format)} * kUnitBytes * kPanelWidth;
}
DFLASH_GPU_BOTH constexpr uint64_t panel_bytes(WeightFormat format, uint32_t inputs) {
  return chain_bytes(format) * num_chains(inputs);
}

inline constexpr uint32_t kInt8RecordBytes = kChain + kChain / 32 * 2 * 4;
DFLASH_GPU_BOTH constexpr uint64_t int8_row_bytes(uint32_t inputs) {
  return uint64_t{num_chains(inputs)} * kInt8RecordBytes;
}
inline constexpr uint32_t kHalfRecordBytes = 2 * kChain + kChain / 32 * 2 * 4;
DFLASH_GPU_BOTH constexpr uint64_t half_row_bytes(uint32_t inputs) {
  return uint64_t{num_chains(inputs)} * kHalfRecordBytes;
}

}  // namespace dflash::compute::gpu

// The machine's limits as the kernels of one instruction set can reach them: multiply-adds from
// registers, bytes read from memory. What `bench experts` holds the kernels against, measured in
// the same run.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "compute/cpu/cpu_backend.h"

namespace dflash::measure {

struct PeakLoops {
  // `rounds` passes over independent fma chains in registers; returns floating-point operations
  // done (2 per lane and fma). `sink` receives something that depends on all of them.
  uint64_t (*multiply_add)(uint64_t rounds, float* sink);
  // Reads [data, data + num_bytes), a multiple of 512 bytes, 64-byte aligned.
  void (*read)(const std::byte* data, size_t num_bytes, float* sink);
};

extern const PeakLoops kScalarPeaks;
#if defined(__x86_64__)
extern const PeakLoops kAvx2Peaks;
extern const PeakLoops kAvx512Peaks;
// As PeakLoops::multiply_add, of AVX512-BF16's pair-wise dot products: 4 operations per lane and
// instruction.
uint64_t bf16_multiply_add_avx512bf16(uint64_t rounds, float* sink);
// As PeakLoops::multiply_add, of int8 products summed in int32: 2 operations per product.
uint64_t integer_multiply_add_avx2(uint64_t rounds, float* sink);
uint64_t integer_multiply_add_avx512(uint64_t rounds, float* sink);
uint64_t integer_multiply_add_avx512vnni(uint64_t rounds, float* sink);
#elif defined(__aarch64__)
extern const PeakLoops kNeonPeaks;
// As PeakLoops::multiply_add, of products of bf16's, and of int8 ones summed in int32: 2 operations
// per product.
uint64_t bf16_multiply_add_neon_bf16(uint64_t rounds, float* sink);
uint64_t integer_multiply_add_neon_dotprod(uint64_t rounds, float* sink);
uint64_t integer_multiply_add_neon_i8mm(uint64_t rounds, float* sink);
#endif

// The loops of an instruction set; those of the reference are the scalar ones.
const PeakLoops& peak_loops(compute::Isa isa);

// Floating-point operations per second of `num_threads` threads together, once per round of about
// `milliseconds`. Errors: kInvalidArgument, kSystem.
Result<std::vector<double>> multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                               uint32_t rounds, double milliseconds);
// Likewise with bf16 factors, where the set has an instruction for them. Errors: also kUnsupported.
Result<std::vector<double>> bf16_multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                                    uint32_t rounds, double milliseconds);
// Likewise of int8 products summed in int32, exactly. Errors: also kUnsupported.
Result<std::vector<double>> integer_multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                                       uint32_t rounds, double milliseconds);
// Bytes per second read by `num_threads` threads together from `num_bytes` of touched memory each.
// Errors: also kOutOfMemory.
Result<std::vector<double>> read_bytes_per_s(compute::Isa isa, uint32_t num_threads,
                                             uint32_t rounds, size_t num_bytes);

}  // namespace dflash::measure

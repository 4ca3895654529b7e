// The machine's limits as far as the kernels of one instruction set can reach them: multiply-adds
// from registers, and bytes read from memory. `bench experts` holds the kernels against them,
// measured in the same run.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "compute/cpu/cpu_backend.h"

namespace dflash::measure {

// The loops of one instruction set.
struct PeakLoops {
  // Makes `rounds` passes over independent chains of fmas in registers, and returns the
  // floating-point operations done (2 per lane and fma). `sink` receives something that depends on
  // all of them, so that the compiler drops none.
  uint64_t (*multiply_add)(uint64_t rounds, float* sink);
  // Reads [data, data + num_bytes), which is 64-byte aligned and a multiple of 512 bytes.
  void (*read)(const std::byte* data, size_t num_bytes, float* sink);
};

extern const PeakLoops kScalarPeaks;
#if defined(__x86_64__)
extern const PeakLoops kAvx2Peaks;
extern const PeakLoops kAvx512Peaks;
// Does as PeakLoops::multiply_add with the pair-wise dot products of AVX512-BF16: 4 operations per
// lane and instruction.
uint64_t bf16_multiply_add_avx512bf16(uint64_t rounds, float* sink);
// Do as PeakLoops::multiply_add with int8 products summed in int32: 2 operations per product.
uint64_t integer_multiply_add_avx2(uint64_t rounds, float* sink);
uint64_t integer_multiply_add_avx512(uint64_t rounds, float* sink);
uint64_t integer_multiply_add_avx512vnni(uint64_t rounds, float* sink);
#elif defined(__aarch64__)
extern const PeakLoops kNeonPeaks;
// Do as PeakLoops::multiply_add with products of bf16, and with int8 ones summed in int32: 2
// operations per product.
uint64_t bf16_multiply_add_neon_bf16(uint64_t rounds, float* sink);
uint64_t integer_multiply_add_neon_dotprod(uint64_t rounds, float* sink);
uint64_t integer_multiply_add_neon_i8mm(uint64_t rounds, float* sink);
#endif

// The loops of an instruction set. The reference has those of scalar.
const PeakLoops& peak_loops(compute::Isa isa);

// Floating-point operations per second of `num_threads` threads together, in rounds of about
// `milliseconds` with one sample each. Errors: kInvalidArgument, kSystem.
Result<std::vector<double>> multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                               uint32_t rounds, double milliseconds);
// The same with bf16 factors, where the set has an instruction for them. Errors: also kUnsupported.
Result<std::vector<double>> bf16_multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                                    uint32_t rounds, double milliseconds);
// The same with int8 products summed in int32, exactly. Errors: also kUnsupported.
Result<std::vector<double>> integer_multiply_add_per_s(compute::Isa isa, uint32_t num_threads,
                                                       uint32_t rounds, double milliseconds);
// Bytes per second that `num_threads` threads read together, each from `num_bytes` of memory that
// has been touched. Errors: also kOutOfMemory.
Result<std::vector<double>> read_bytes_per_s(compute::Isa isa, uint32_t num_threads,
                                             uint32_t rounds, size_t num_bytes);

}  // namespace dflash::measure

// Quantises whole rows at load with the widest instructions of this processor. Integers and scales
// are those of quantize_group (dequantize.h), the readable twin, with every instruction set. The
// values must be finite, which check_values has established before.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::compute {

// Quantises groups of 32 values: `values` and `integers` are [num_groups * 32], `scales` is
// [num_groups]. `limit` is the largest magnitude of an integer, 127 for int8_g32 and 7 for
// int4_g32.
void quantize_groups(const float* values, uint32_t num_groups, float limit, int8_t* integers,
                     float* scales);

namespace internal {
#if defined(__x86_64__)
void quantize_groups_avx2(const float* values, uint32_t num_groups, float limit, int8_t* integers,
                          float* scales);
void quantize_groups_avx512(const float* values, uint32_t num_groups, float limit, int8_t* integers,
                            float* scales);
#endif
}  // namespace internal

}  // namespace dflash::compute

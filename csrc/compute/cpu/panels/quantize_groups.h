// Quantisation of whole rows at load, as wide as this processor allows: the integers and scales are
// those of quantize_group (dequantize.h), its readable twin, whatever the instruction set. Values
// are finite (check_values comes first).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::compute {

// `values` and `integers` [num_groups * 32], `scales` [num_groups]; `limit` is 127 or 7.
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

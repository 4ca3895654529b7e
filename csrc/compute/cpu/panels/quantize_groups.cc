// Chooses the widest loop that this processor can run, see quantize_groups.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/panels/quantize_groups.h"

#include "base/convert_kernels.h"
#include "compute/formats/dequantize.h"

namespace dflash::compute {

void quantize_groups(const float* values, uint32_t num_groups, float limit, int8_t* integers,
                     float* scales) {
#if defined(__x86_64__)
  if (dflash::internal::has_avx512())
    return internal::quantize_groups_avx512(values, num_groups, limit, integers, scales);
  if (dflash::internal::has_avx2_f16c())
    return internal::quantize_groups_avx2(values, num_groups, limit, integers, scales);
#endif
  for (uint32_t group = 0; group < num_groups; ++group) {
    const size_t at = size_t{group} * kGroupInputs;
    scales[group] = quantize_group(values + at, limit, integers + at);
  }
}

}  // namespace dflash::compute

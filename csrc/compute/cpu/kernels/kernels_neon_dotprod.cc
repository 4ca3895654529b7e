// The kernels of numerics class int8-groups for AArch64's dot product extension: SDOT adds four
// products of bytes to each lane, exactly.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
// This file gives the vector type a name of its own, so that nothing instantiated here is linked
// into code for processors without the instruction.
#define NeonVector NeonDotprodVector
#include "compute/cpu/kernels/vector_neon.h"

#include "compute/cpu/kernels/int8_products.h"

namespace dflash::compute {
namespace {

struct SdotBytes : NeonBytes {
  static constexpr uint32_t kTileRows = 6;  // 12 integer sums and 12 float sums of 32 registers

  template <bool kIsSigned>
  [[gnu::always_inline]] static inline I dot(I codes, I inputs, I sum) {
    return vdotq_s32(sum, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(inputs));
  }
};

}  // namespace

constinit const KernelSet kNeonDotprodInt8 = make_int8_set<NeonVector, SdotBytes>();

}  // namespace dflash::compute
#endif

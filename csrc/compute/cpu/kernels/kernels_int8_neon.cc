// The kernels for NEON, which every AArch64 has, on int8 codes. Products of bytes have 16 bits and
// are added in pairs twice, into 32 bits.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include "compute/cpu/kernels/vector_neon.h"

#include "compute/cpu/kernels/int8_products.h"

namespace dflash::compute {
namespace {

struct NeonDot : NeonBytes {
  static constexpr uint32_t kTileRows = 4;

  template <bool kIsSigned>
  [[gnu::always_inline]] static inline I dot(I codes, I inputs, I sum) {
    const int8x16_t a = vreinterpretq_s8_s32(codes), b = vreinterpretq_s8_s32(inputs);
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b))),
                    high = vpaddlq_s16(vmull_high_s8(a, b));
    return vaddq_s32(sum, vpaddq_s32(low, high));
  }
};

}  // namespace

constinit const KernelSet kNeonInt8 = make_int8_set<NeonVector, NeonDot>();

}  // namespace dflash::compute
#endif

// The kernels of numerics class int8-groups for AVX-512-VNNI. VPDPBUSD takes the weights as
// unsigned bytes, so signed codes are moved up by 128 and the sums start from what that adds.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
// This file gives the vector type a name of its own, so that nothing instantiated here is linked
// into code for processors without the instruction.
#define Avx512Vector Avx512VnniVector
#include "compute/cpu/kernels/vector_avx512.h"

#include "compute/cpu/kernels/int8_products.h"

namespace dflash::compute {
namespace {

struct VnniDot : Avx512Bytes {
  static constexpr int32_t kSignedOffset = 128;
  static constexpr uint32_t kTileRows = 6;
  static I as_signed_codes(I bytes) {
    return _mm512_xor_si512(bytes, _mm512_set1_epi32(static_cast<int>(0x80808080u)));
  }

  template <bool kIsSigned>
  [[gnu::always_inline]] static inline I dot(I codes, I inputs, I sum) {
    return _mm512_dpbusd_epi32(sum, codes, inputs);
  }
};

}  // namespace

constinit const KernelSet kAvx512VnniInt8 = make_int8_set<Avx512Vector, VnniDot>();

}  // namespace dflash::compute
#endif

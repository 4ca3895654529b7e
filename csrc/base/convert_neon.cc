// The conversion loops with NEON, which every AArch64 has. Tails run the scalar table, which gives
// the same bits. The instructions that widen f16 and narrow to it ignore flush-to-zero, and keep
// NaN payloads as dtype.cc does.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include <arm_neon.h>

#include "base/convert_kernels.h"

namespace dflash::internal {
namespace {

// Rows in a frame are not aligned, and loads of bytes need no alignment.
inline uint8x16_t load_bytes(const std::byte* at) {
  return vld1q_u8(reinterpret_cast<const uint8_t*>(at));
}
inline float32x4_t load_f32(const std::byte* at) { return vreinterpretq_f32_u8(load_bytes(at)); }
inline uint16x8_t load_u16(const std::byte* at) { return vreinterpretq_u16_u8(load_bytes(at)); }
inline void store_u16(std::byte* at, uint16x8_t value) {
  vst1q_u8(reinterpret_cast<uint8_t*>(at), vreinterpretq_u8_u16(value));
}

// All ones in the lanes whose finite value rounds to infinity: magnitudes in [kOverflow,
// kInfinity).
template <uint32_t kOverflow>
inline uint32x4_t overflows(float32x4_t value) {
  const uint32x4_t magnitude = vandq_u32(vreinterpretq_u32_f32(value), vdupq_n_u32(0x7fffffffu));
  return vcltq_u32(vsubq_u32(magnitude, vdupq_n_u32(kOverflow)),
                   vdupq_n_u32(kInfinity - kOverflow));
}

inline uint16x4_t round_f16(float32x4_t value) { return vreinterpret_u16_f16(vcvt_f16_f32(value)); }

inline uint16x4_t round_bf16(float32x4_t value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint16x4_t rounded = vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  const uint16x4_t quiet = vorr_u16(vshrn_n_u32(bits, 16), vdup_n_u16(0x40));
  return vbsl_u16(vmovn_u32(vceqq_f32(value, value)), rounded, quiet);
}

using NarrowLoop = bool (*)(const std::byte* source, std::byte* destination, size_t count);

template <uint16x4_t (*kRound)(float32x4_t), uint32_t kOverflow>
inline bool narrow(NarrowLoop tail, const std::byte* source, std::byte* destination, size_t count) {
  uint32x4_t bad = vdupq_n_u32(0);
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const float32x4_t low = load_f32(source + 4 * i), high = load_f32(source + 4 * i + 16);
    bad = vorrq_u32(bad, vorrq_u32(overflows<kOverflow>(low), overflows<kOverflow>(high)));
    store_u16(destination + 2 * i, vcombine_u16(kRound(low), kRound(high)));
  }
  const bool tail_in_range = tail(source + 4 * i, destination + 2 * i, count - i);
  return vmaxvq_u32(bad) == 0 && tail_in_range;
}

bool narrow_f16(const std::byte* source, std::byte* destination, size_t count) {
  return narrow<round_f16, kF16Overflow>(kConvertScalar.narrow_f16, source, destination, count);
}
bool narrow_bf16(const std::byte* source, std::byte* destination, size_t count) {
  return narrow<round_bf16, kBF16Overflow>(kConvertScalar.narrow_bf16, source, destination, count);
}

struct F16 {
  static float32x4_t low(uint16x8_t halves) {
    return vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(halves)));
  }
  static float32x4_t high(uint16x8_t halves) {
    return vcvt_high_f32_f16(vreinterpretq_f16_u16(halves));
  }
};
struct BF16 {
  static float32x4_t low(uint16x8_t halves) {
    return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16));
  }
  static float32x4_t high(uint16x8_t halves) {
    return vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16));
  }
};

// Widens whole steps of eight and returns how many elements that were.
template <class Source>
inline size_t widen_steps(const std::byte* source, float* destination, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const uint16x8_t halves = load_u16(source + 2 * i);
    vst1q_f32(destination + i, Source::low(halves));
    vst1q_f32(destination + i + 4, Source::high(halves));
  }
  return i;
}

void widen_f16(const std::byte* source, float* destination, size_t count) {
  const size_t i = widen_steps<F16>(source, destination, count);
  kConvertScalar.widen_f16(source + 2 * i, destination + i, count - i);
}
void widen_bf16(const std::byte* source, float* destination, size_t count) {
  const size_t i = widen_steps<BF16>(source, destination, count);
  kConvertScalar.widen_bf16(source + 2 * i, destination + i, count - i);
}

inline void add_at(float* accumulator, float32x4_t value) {
  const float32x4_t sum = vaddq_f32(vld1q_f32(accumulator), value);
  vst1q_f32(accumulator,
            vbslq_f32(vceqq_f32(sum, sum), sum, vreinterpretq_f32_u32(vdupq_n_u32(kCanonicalNan))));
}

template <class Source>
inline size_t widen_add_steps(const std::byte* source, float* accumulator, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const uint16x8_t halves = load_u16(source + 2 * i);
    add_at(accumulator + i, Source::low(halves));
    add_at(accumulator + i + 4, Source::high(halves));
  }
  return i;
}

void widen_add_f32(const std::byte* source, float* accumulator, size_t count) {
  size_t i = 0;
  for (; i + 4 <= count; i += 4) add_at(accumulator + i, load_f32(source + 4 * i));
  kConvertScalar.widen_add_f32(source + 4 * i, accumulator + i, count - i);
}
void widen_add_f16(const std::byte* source, float* accumulator, size_t count) {
  const size_t i = widen_add_steps<F16>(source, accumulator, count);
  kConvertScalar.widen_add_f16(source + 2 * i, accumulator + i, count - i);
}
void widen_add_bf16(const std::byte* source, float* accumulator, size_t count) {
  const size_t i = widen_add_steps<BF16>(source, accumulator, count);
  kConvertScalar.widen_add_bf16(source + 2 * i, accumulator + i, count - i);
}

}  // namespace

const ConvertKernels kConvertNeon = {narrow_f16,    narrow_bf16,   widen_f16,     widen_bf16,
                                     widen_add_f32, widen_add_f16, widen_add_bf16};

}  // namespace dflash::internal
#endif

// Conversions of many elements: the scalar loops, and the choice of loops by what the processor
// has.
// SPDX-License-Identifier: Apache-2.0
#include "base/dtype.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/convert_kernels.h"

namespace dflash {
namespace internal {
namespace {

template <class T>
T load(const std::byte* source, size_t index) {
  T value;
  std::memcpy(&value, source + index * sizeof(T), sizeof(T));
  return value;
}

template <uint16_t (*kNarrow)(float), uint32_t kOverflow>
bool narrow(const std::byte* source, std::byte* destination, size_t count) {
  bool in_range = true;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = load<uint32_t>(source, i);
    const uint16_t narrowed = kNarrow(std::bit_cast<float>(bits));
    std::memcpy(destination + 2 * i, &narrowed, 2);
    const uint32_t magnitude = bits & 0x7fffffffu;
    in_range &= magnitude < kOverflow || magnitude >= kInfinity;
  }
  return in_range;
}

template <float (*kWiden)(uint16_t)>
void widen_loop(const std::byte* source, float* destination, size_t count) {
  for (size_t i = 0; i < count; ++i) destination[i] = kWiden(load<uint16_t>(source, i));
}

float add_canonical(float a, float b) {
  const float sum = a + b;
  return sum != sum ? std::bit_cast<float>(kCanonicalNan) : sum;
}

template <float (*kWiden)(uint16_t)>
void widen_add_loop(const std::byte* source, float* accumulator, size_t count) {
  for (size_t i = 0; i < count; ++i)
    accumulator[i] = add_canonical(accumulator[i], kWiden(load<uint16_t>(source, i)));
}

void add_f32(const std::byte* source, float* accumulator, size_t count) {
  for (size_t i = 0; i < count; ++i)
    accumulator[i] = add_canonical(accumulator[i], load<float>(source, i));
}

// Short rows take the scalar loops: fewer than eight elements do not fill a vector.
const ConvertKernels& kernels_for(size_t count) {
#if defined(__x86_64__)
  if (count >= 8) {
    if (has_avx512()) return kConvertAvx512;
    if (has_avx2_f16c()) return kConvertAvx2;
  }
#elif defined(__aarch64__)
  if (count >= 8) return kConvertNeon;
#else
  static_cast<void>(count);
#endif
  return kConvertScalar;
}

}  // namespace

const ConvertKernels kConvertScalar = {
    narrow<f32_to_f16, kF16Overflow>,
    narrow<f32_to_bf16, kBF16Overflow>,
    widen_loop<f16_to_f32>,
    widen_loop<bf16_to_f32>,
    add_f32,
    widen_add_loop<f16_to_f32>,
    widen_add_loop<bf16_to_f32>,
};

// These are asked for every row, so they must not execute cpuid, which leaves a virtual machine and
// costs microseconds. The builtins read what libgcc found out at load.
bool has_avx2_f16c() {
#if defined(__x86_64__) && defined(__clang__)
  // clang 14 does not know the name "f16c"; every processor with AVX2 and FMA has it.
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

bool has_avx512_vnni() {
#if defined(__x86_64__)
  return has_avx512() && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool has_avx512_bf16() {
#if defined(__x86_64__)
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

#if defined(__aarch64__)
// These read words that the kernel left in memory at start, without a system call.
bool has_neon_dotprod() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
bool has_neon_i8mm() { return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0; }
bool has_neon_bf16() { return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }
#else
bool has_neon_dotprod() { return false; }
bool has_neon_i8mm() { return false; }
bool has_neon_bf16() { return false; }
#endif

}  // namespace internal

namespace {

bool narrow(Dtype to, const std::byte* source, std::byte* destination, size_t count) {
  const internal::ConvertKernels& kernels = internal::kernels_for(count);
  return (to == Dtype::kF16 ? kernels.narrow_f16 : kernels.narrow_bf16)(source, destination, count);
}

// Converts between the 16-bit types, through float32 in blocks that stay in the first-level cache.
bool convert_through_f32(Dtype from, const std::byte* source, Dtype to, std::byte* destination,
                         size_t count) {
  constexpr size_t kBlock = 512;
  float wide[kBlock];
  bool in_range = true;
  for (size_t done = 0; done < count; done += kBlock) {
    const size_t size = std::min(kBlock, count - done);
    widen(from, source + 2 * done, wide, size);
    in_range &= narrow(to, reinterpret_cast<const std::byte*>(wide), destination + 2 * done, size);
  }
  return in_range;
}

}  // namespace

void widen(Dtype from, const std::byte* source, float* destination, size_t count) {
  if (from == Dtype::kF32) {
    if (count != 0) std::memcpy(destination, source, 4 * count);
    return;
  }
  const internal::ConvertKernels& kernels = internal::kernels_for(count);
  (from == Dtype::kF16 ? kernels.widen_f16 : kernels.widen_bf16)(source, destination, count);
}

void widen_add(Dtype from, const std::byte* source, float* accumulator, size_t count) {
  const internal::ConvertKernels& kernels = internal::kernels_for(count);
  (from == Dtype::kF32   ? kernels.widen_add_f32
   : from == Dtype::kF16 ? kernels.widen_add_f16
                         : kernels.widen_add_bf16)(source, accumulator, count);
}

bool convert(Dtype from, const std::byte* source, Dtype to, std::byte* destination, size_t count) {
  if (from == to) {
    if (count != 0) std::memcpy(destination, source, count * dtype_bytes(from));
    return true;
  }
  if (from == Dtype::kF32) return narrow(to, source, destination, count);
  if (to != Dtype::kF32) return convert_through_f32(from, source, to, destination, count);
  if (reinterpret_cast<uintptr_t>(destination) % alignof(float) == 0) {
    widen(from, source, reinterpret_cast<float*>(destination), count);
    return true;
  }
  constexpr size_t kBlock = 512;
  float wide[kBlock];
  for (size_t done = 0; done < count; done += kBlock) {
    const size_t size = std::min(kBlock, count - done);
    widen(from, source + 2 * done, wide, size);
    std::memcpy(destination + 4 * done, wide, 4 * size);
  }
  return true;
}

}  // namespace dflash

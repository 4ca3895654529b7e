// The floating-point control word of f32-canonical: round to nearest, no flush to zero, no
// denormals-are-zero. The calling process may have set something else (torch.set_flush_denormal),
// so that every computing thread holds one of these while it computes. On AArch64 it also lets NaN
// payloads propagate (DN off) and makes f16 IEEE's (AHP off), as the conversions between dtypes
// expect.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace dflash::compute {

// Sets the mode of the calling thread and restores the former one at its end.
class CanonicalFloatMode {
 public:
#if defined(__x86_64__)
  // All exceptions are masked; everything else is zero.
  CanonicalFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~CanonicalFloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  // A write costs tens of cycles, so it is made only where it would change something.
  CanonicalFloatMode() : saved_(control()) {
    if (saved_ != kCanonical) set_control(kCanonical);
  }
  ~CanonicalFloatMode() {
    if (saved_ != kCanonical) set_control(saved_);
  }
#else
  CanonicalFloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~CanonicalFloatMode() { std::fesetenv(&saved_); }
#endif
  CanonicalFloatMode(const CanonicalFloatMode&) = delete;
  CanonicalFloatMode& operator=(const CanonicalFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#elif defined(__aarch64__)
  // Round to nearest; FZ, FZ16, DN, AHP and all traps are off.
  static constexpr uint64_t kCanonical = 0;
  static uint64_t control() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value)::"memory");
    return value;
  }
  static void set_control(uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
  uint64_t saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace dflash::compute

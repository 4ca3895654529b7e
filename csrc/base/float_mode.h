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

namespace dflash {

// Sets the mode of the calling thread for good; for threads of our own.
inline void set_canonical_float_mode() {
#if defined(__x86_64__)
  _mm_setcsr(0x1f80);  // all exceptions are masked; everything else is zero
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}) : "memory");  // FZ, FZ16, DN, AHP and traps off
#else
  std::fesetenv(FE_DFL_ENV);
#endif
}

// Sets the mode of the calling thread and restores the former one at its end.
class CanonicalFloatMode {
 public:
#if defined(__x86_64__)
  CanonicalFloatMode() : saved_(_mm_getcsr()) { set_canonical_float_mode(); }
  ~CanonicalFloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  // A write costs tens of cycles, so it is made only where it would change something.
  CanonicalFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_)::"memory");
    if (saved_ != 0) set_canonical_float_mode();
  }
  ~CanonicalFloatMode() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(saved_) : "memory");
  }
#else
  CanonicalFloatMode() {
    std::fegetenv(&saved_);
    set_canonical_float_mode();
  }
  ~CanonicalFloatMode() { std::fesetenv(&saved_); }
#endif
  CanonicalFloatMode(const CanonicalFloatMode&) = delete;
  CanonicalFloatMode& operator=(const CanonicalFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#elif defined(__aarch64__)
  uint64_t saved_ = 0;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace dflash

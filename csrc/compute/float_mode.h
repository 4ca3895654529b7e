// The floating-point control word of f32-canonical: round to nearest, no flush to zero, no denormals-are-zero. Callers may come
// from a process that set something else (torch.set_flush_denormal), so every computing thread holds one of these.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace dflash::compute {

class CanonicalFloatMode {
 public:
#if defined(__x86_64__)
  CanonicalFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // all exceptions masked, everything else zero
  ~CanonicalFloatMode() { _mm_setcsr(saved_); }
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
#else
  std::fenv_t saved_;
#endif
};

}  // namespace dflash::compute

// Floating-point modes that a program may have set in the thread which calls us.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dflash {

#if defined(__x86_64__)
// Without the exceptions seen so far.
inline unsigned float_control() { return _mm_getcsr() & 0xffc0u; }
inline void set_float_control(unsigned word) { _mm_setcsr(word); }
inline constexpr unsigned kFlushing = 0x1f80 | 0x8040, kUpward = 0x1f80 | 0x4000;
inline constexpr unsigned kFlushingDownward = kFlushing | 0x2000;
#elif defined(__aarch64__)
inline unsigned float_control() {
  uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word)::"memory");
  return static_cast<unsigned>(word);
}
inline void set_float_control(unsigned word) {
  asm volatile("msr fpcr, %0" ::"r"(uint64_t{word}) : "memory");
}
inline constexpr unsigned kFlushing = 1u << 24, kUpward = 1u << 22;
inline constexpr unsigned kFlushingDownward = kFlushing | 2u << 22;
#endif
inline constexpr unsigned kForeignModes[] = {kFlushing, kUpward, kFlushingDownward};

// Sets a mode for the length of a scope.
class ForeignFloatMode {
 public:
  explicit ForeignFloatMode(unsigned word) : former_(float_control()) { set_float_control(word); }
  ~ForeignFloatMode() { set_float_control(former_); }
  ForeignFloatMode(const ForeignFloatMode&) = delete;
  ForeignFloatMode& operator=(const ForeignFloatMode&) = delete;

 private:
  const unsigned former_;
};

}  // namespace dflash

// A fibre: a call stack that gives way and goes on later, on whatever thread resumes it. One per
// simulated thread of a block. Own context switch for x86-64 and AArch64 (a tenth of swapcontext's
// time, which makes two system calls), ucontext elsewhere. Told to AddressSanitizer.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define DFLASH_FIBRE_UCONTEXT 1
#include <ucontext.h>
#endif

namespace dflash {

class Fibre {
 public:
  using Body = void (*)(void* argument);

  // Readies body(argument) on [stack, stack + stack_bytes), forgetting whatever ran there. `body`
  // must not return: its last act is yield_last.
  void prepare(std::byte* stack, size_t stack_bytes, Body body, void* argument);
  // Runs the fibre until it yields. Called outside of it.
  void resume();
  // Gives way to who resumed. Called inside.
  void yield();
  void yield_last();  // never resumed again until the next prepare()

 private:
  void leave(bool for_good);
  static void enter(Fibre* self);
#ifdef DFLASH_FIBRE_UCONTEXT
  static void enter_halves(unsigned high, unsigned low);
  ucontext_t own_{}, resumer_{};
#else
  void* own_ = nullptr;  // stack pointers while not running
  void* resumer_ = nullptr;
#endif
  Body body_ = nullptr;
  void* argument_ = nullptr;
  std::byte* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* own_fake_ = nullptr;  // AddressSanitizer's, while not running
  [[maybe_unused]] const void* resumer_stack_ = nullptr;
  [[maybe_unused]] size_t resumer_stack_bytes_ = 0;
};

}  // namespace dflash

// The context switches: callee-saved registers on the stack, stack pointers exchanged. The
// floating-point control word is the thread's and stays: nothing here changes it.
// SPDX-License-Identifier: Apache-2.0
#include "base/fibre.h"

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define DFLASH_FIBRE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DFLASH_FIBRE_ASAN 1
#endif
#endif
#ifdef DFLASH_FIBRE_ASAN
#include <sanitizer/asan_interface.h>
#endif

#if defined(__x86_64__)
asm(R"(
.text
.hidden dflash_fibre_switch
.globl dflash_fibre_switch
.type dflash_fibre_switch, @function
dflash_fibre_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size dflash_fibre_switch, .-dflash_fibre_switch
.hidden dflash_fibre_begin
.globl dflash_fibre_begin
.type dflash_fibre_begin, @function
dflash_fibre_begin:
  movq %rbx, %rdi
  jmp *%r12
.size dflash_fibre_begin, .-dflash_fibre_begin
)");
#elif defined(__aarch64__)
asm(R"(
.text
.hidden dflash_fibre_switch
.globl dflash_fibre_switch
.type dflash_fibre_switch, %function
dflash_fibre_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size dflash_fibre_switch, .-dflash_fibre_switch
.hidden dflash_fibre_begin
.globl dflash_fibre_begin
.type dflash_fibre_begin, %function
dflash_fibre_begin:
  mov x0, x19
  br x20
.size dflash_fibre_begin, .-dflash_fibre_begin
)");
#endif
#ifndef DFLASH_FIBRE_UCONTEXT
extern "C" void dflash_fibre_switch(void** save_stack_pointer, void* load_stack_pointer);
// Where a new fibre begins: prepare() has left body and argument in two saved registers, and this
// calls the one with the other.
extern "C" void dflash_fibre_begin();
#endif

namespace dflash {

void Fibre::prepare(std::byte* stack, size_t stack_bytes, Body body, void* argument) {
  body_ = body;
  argument_ = argument;
  stack_ = stack;
  stack_bytes_ = stack_bytes;
  own_fake_ = nullptr;
#ifdef DFLASH_FIBRE_ASAN
  __asan_unpoison_memory_region(stack, stack_bytes);  // frames that were abandoned
#endif
#if defined(DFLASH_FIBRE_UCONTEXT)
  getcontext(&own_);
  own_.uc_stack.ss_sp = stack;
  own_.uc_stack.ss_size = stack_bytes;
  own_.uc_link = nullptr;
  const auto address = reinterpret_cast<uint64_t>(this);
  makecontext(&own_, reinterpret_cast<void (*)()>(&Fibre::enter_halves), 2,
              static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
#elif defined(__x86_64__)
  // r15 r14 r13 r12 rbx rbp, the address that `ret` takes, and a null return address for unwinders.
  // 16-aligned at the first word.
  auto* words =
      reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + stack_bytes) / 16 * 16) -
      8;
  for (int i = 0; i < 8; ++i) words[i] = 0;
  words[3] = reinterpret_cast<uintptr_t>(&Fibre::enter);
  words[4] = reinterpret_cast<uintptr_t>(this);
  words[6] = reinterpret_cast<uintptr_t>(&dflash_fibre_begin);
  own_ = words;
#else
  auto* words =
      reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + stack_bytes) / 16 * 16) -
      20;
  for (int i = 0; i < 20; ++i) words[i] = 0;
  words[0] = reinterpret_cast<uintptr_t>(this);                  // x19
  words[1] = reinterpret_cast<uintptr_t>(&Fibre::enter);         // x20
  words[11] = reinterpret_cast<uintptr_t>(&dflash_fibre_begin);  // x30
  own_ = words;
#endif
}

void Fibre::resume() {
#ifdef DFLASH_FIBRE_ASAN
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, stack_, stack_bytes_);
#endif
#ifdef DFLASH_FIBRE_UCONTEXT
  swapcontext(&resumer_, &own_);
#else
  dflash_fibre_switch(&resumer_, own_);
#endif
#ifdef DFLASH_FIBRE_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void Fibre::leave([[maybe_unused]] bool for_good) {
#ifdef DFLASH_FIBRE_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &own_fake_, resumer_stack_,
                                 resumer_stack_bytes_);
#endif
#ifdef DFLASH_FIBRE_UCONTEXT
  swapcontext(&own_, &resumer_);
#else
  dflash_fibre_switch(&own_, resumer_);
#endif
#ifdef DFLASH_FIBRE_ASAN
  __sanitizer_finish_switch_fiber(own_fake_, &resumer_stack_, &resumer_stack_bytes_);
#endif
}

void Fibre::yield() { leave(false); }
void Fibre::yield_last() { leave(true); }

void Fibre::enter(Fibre* self) {
#ifdef DFLASH_FIBRE_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &self->resumer_stack_, &self->resumer_stack_bytes_);
#endif
  self->body_(self->argument_);
}

#ifdef DFLASH_FIBRE_UCONTEXT
void Fibre::enter_halves(unsigned high, unsigned low) {
  enter(reinterpret_cast<Fibre*>(static_cast<uint64_t>(high) << 32 | low));
}
#endif

}  // namespace dflash

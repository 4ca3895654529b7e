// What a simulated thread sees of its block: the functions that portable.h maps to when kernels are
// compiled for the CPU. They act on the block that runs on the calling fibre. Sites are the source
// lines of the kernel, for the detectors' messages.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef DFLASH_SIM_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace dflash::compute::gpu::sim {

struct Site {
  const char* file = "";
  unsigned line = 0;
};

struct ThreadPlace {
  uint32_t thread;
  uint32_t num_threads;
  uint32_t block_x;
  uint32_t block_y;
  uint32_t grid_x;
  uint32_t wave_width;
};
ThreadPlace thread_place();

enum class Collective : uint8_t { kBarrier, kShuffle, kBallot };

void block_barrier(Site site);
// All 32 lanes of the sub-group arrive; kShuffle: returns the value of lane `argument` (0..31),
// kBallot: bit i is lane i's value != 0.
uint64_t subgroup_collective(Collective kind, uint64_t value, uint32_t argument, Site site);
// The block's shared object of this declaration, the same for all its threads, at first filled with
// bytes 0xff (NaN).
void* shared_object(size_t num_bytes, Site site);
// Lets other threads of the block, and whoever waits for it, go on. For loops that wait for memory
// to change.
void pause_thread();
// Tell ThreadSanitizer, to which kernels are invisible, what a load or store of the whole system
// orders: behind the load, before the store.
#ifdef DFLASH_SIM_TSAN
inline void note_acquire(const void* at) { __tsan_acquire(const_cast<void*>(at)); }
inline void note_release(void* at) { __tsan_release(at); }
#else
inline void note_acquire(const void*) {}
inline void note_release(void*) {}
#endif
// Nanoseconds of the machine's monotonic clock.
uint64_t clock_ns();
// Ends the block with an error.
[[noreturn]] void out_of_bounds(uint64_t index, uint64_t size, Site site);
[[noreturn]] void fail_thread(const char* what, uint64_t value, Site site);

// The block's shared memory of the size that the launch asked for; 16-byte aligned and no better,
// at first filled with bytes 0xff.
void* dynamic_shared(Site site);
// The address of an object in shared memory as instructions name it, from 0 on, and the memory at
// such an address.
uint32_t shared_address(const void* at, Site site);
void* shared_at(uint32_t address, size_t num_bytes, Site site);

}  // namespace dflash::compute::gpu::sim

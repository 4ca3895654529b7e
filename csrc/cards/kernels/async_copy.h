// Copies of 16 bytes from device memory into shared memory that run while their thread goes on
// (PTX: cp.async, sm_80 and later). Copies are counted in groups, and a wait names how many of the
// newest groups may still be under way. The bytes they write belong to the generic proxy, as those
// of ordinary stores do.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

#if defined(DFLASH_GPU_SIM)
#include "cards/sim/async_work.h"
#endif

namespace dflash::compute::gpu {

inline constexpr uint32_t kCacheLine = 128;  // bytes

#if defined(DFLASH_GPU_SIM)
GPU_FN void prefetch(const void*) {}
// Starts a copy of 16 bytes; a null source stands for zeros.
GPU_FN void copy_async(Unit& to, const void* from GPU_SITE) {
  sim::copy_unit_async(&to, from, {file, line});
}
GPU_FN void commit_copies() { sim::commit_copies(); }
template <uint32_t kMost>
GPU_FN void wait_copies() {
  sim::wait_copies(kMost);
}
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// Asks for a line in the L2 cache.
GPU_FN void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
}
// The copy goes past the L1 cache, because a block reads nothing twice. Where the source is null,
// the instruction reads 0 bytes and stores zeros.
GPU_FN void copy_async(Unit& to, const void* from) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(&to));
  const uint32_t num_bytes = from == nullptr ? 0 : 16;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at),
               "l"(__cvta_generic_to_global(from)), "r"(num_bytes)
               : "memory");
}
GPU_FN void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t kMost>
GPU_FN void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kMost) : "memory");
}
#endif

}  // namespace dflash::compute::gpu

// Warpgroups of sm_90a: wgmma.mma_async in bf16, both operands from shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/warpgroup_layout.h"

namespace dflash::compute::gpu {

struct Warpgroup {
  GPU_FN static uint32_t address(const Unit& unit) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&unit));
  }
  GPU_FN static void store(Unit& to, const Unit& unit) {
    *reinterpret_cast<uint4*>(&to) =
        make_uint4(unit.words[0], unit.words[1], unit.words[2], unit.words[3]);
  }
  // What this thread stored or copied into shared memory, before the barrier after which products
  // read it.
  GPU_FN static void fence_operands() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  // Before the first product of a group.
  GPU_FN static void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  GPU_FN static void multiply_add(WarpgroupSums& sums, uint64_t rows, uint64_t outputs) {
#define DFLASH_SUMS_4(i) \
  "+f"(sums.values[i]), "+f"(sums.values[i + 1]), "+f"(sums.values[i + 2]), "+f"(sums.values[i + 3])
#define DFLASH_SUMS_16(i) \
  DFLASH_SUMS_4(i), DFLASH_SUMS_4(i + 4), DFLASH_SUMS_4(i + 8), DFLASH_SUMS_4(i + 12)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, 0, 0;"
        : DFLASH_SUMS_16(0), DFLASH_SUMS_16(16), DFLASH_SUMS_16(32), DFLASH_SUMS_16(48)
        : "l"(rows), "l"(outputs)
        : "memory");
#undef DFLASH_SUMS_16
#undef DFLASH_SUMS_4
  }
  GPU_FN static void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  // Until at most kMost groups are on their way. After 0 the sums may be read and written.
  template <uint32_t kMost>
  GPU_FN static void wait(WarpgroupSums& sums) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kMost) : "memory");
    if constexpr (kMost == 0) {
      GPU_UNROLL
      // no use moves above the wait
      for (uint32_t i = 0; i < kWarpgroupSums; ++i)
        asm volatile("" : "+f"(sums.values[i])::"memory");
    }
  }
};

}  // namespace dflash::compute::gpu

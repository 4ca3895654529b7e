// Warpgroups of the simulator: the products of sim/async_work.h, which read operands by the same
// descriptors from the same bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/warpgroup_layout.h"
#include "cards/sim/async_work.h"

namespace dflash::compute::gpu {

struct Warpgroup {
  static uint32_t address(const Unit& unit GPU_SITE) {
    return sim::shared_address(&unit, {file, line});
  }
  static void store(Unit& to, const Unit& unit GPU_SITE) {
    sim::store_operand(&to, &unit, {file, line});
  }
  static void fence_operands() { sim::fence_operands(); }
  static void fence(GPU_SITE_FIRST) { sim::fence_products({file, line}); }
  static void multiply_add(WarpgroupSums& sums, uint64_t rows, uint64_t outputs GPU_SITE) {
    sim::multiply_async(sums.values, kWarpgroupOutputs, rows, outputs, {file, line});
  }
  static void commit(GPU_SITE_FIRST) { sim::commit_products({file, line}); }
  template <uint32_t kMost>
  static void wait(WarpgroupSums& GPU_SITE) {
    sim::wait_products(kMost, {file, line});
  }
};

}  // namespace dflash::compute::gpu

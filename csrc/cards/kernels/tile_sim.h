// Tiles of the simulator: plain loops over shared memory, ascending inputs, one fma each. Operands
// are read when they are multiplied, so that a buffer overwritten too early shows as a wrong sum
// even where hardware would have had it in registers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

namespace dflash::compute::gpu {

template <uint32_t kTeam>
struct SimTile {
  static constexpr bool kExists = true;
  static constexpr uint32_t kLanes = kTeam;
  static constexpr uint32_t kValues = 256 / kTeam;
  static_assert(16 % kValues == 0, "a thread's values lie in one row");

  struct Operand {
    const Unit* octets[2];  // [16] each
  };
  struct Sums {
    float values[kValues] = {};
  };

  // Sub-groups are what the simulator can hold together: a team of two of them waits for the whole
  // block, so that all must come here.
  static void sync_team(GPU_SITE_FIRST) {
    if constexpr (kTeam == kSubgroupLanes)
      sim::subgroup_collective(sim::Collective::kBarrier, 0, 0, {file, line});
    else
      sim::block_barrier({file, line});
  }

  template <class Units>
  static Operand load(Units& units, uint32_t first, uint32_t octet_step) {
    // the last one, for the check of the bounds
    static_cast<void>(units.at(first + octet_step + 15));
    return {
        {&units.at(first), &units.at(first + octet_step)}
    };
  }

  static void multiply_add(Sums& sums, const Operand& rows, const Operand& weights) {
    for (uint32_t octet = 0; octet < 2; ++octet) {
      const Unit& inputs = rows.octets[octet][row(0)];
      for (uint32_t i = 0; i < kValues; ++i) {
        const Unit& factors = weights.octets[octet][column(i)];
        float sum = sums.values[i];
        for (uint32_t w = 0; w < 4; ++w) {
          sum = fused(float_of(factors.words[w] << 16), float_of(inputs.words[w] << 16), sum);
          sum = fused(float_of(factors.words[w] & 0xffff0000u),
                      float_of(inputs.words[w] & 0xffff0000u), sum);
        }
        sums.values[i] = sum;
      }
    }
  }

  static uint32_t row(uint32_t) { return thread_index() % kTeam / (16 / kValues); }
  static uint32_t column(uint32_t i) { return thread_index() % (16 / kValues) * kValues + i; }
};

}  // namespace dflash::compute::gpu

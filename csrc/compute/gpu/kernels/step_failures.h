// How the kernels of a device step fail: the first failure stays in the step's state, and every
// later wait or publication returns at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/checksum.h"

namespace dflash::compute::gpu {

struct StepScratch {
  ChecksumScratch sum;
  SharedArray<uint32_t, kMostStepTokens> tokens;  // of a message's rows
  SharedArray<uint32_t, 4> answer;                // of thread 0 to all
  SharedArray<uint32_t, kFrameBytes / 4> header;
};

// Code in bits 56..63, the shard's place in 40..55, the call in 24..39, detail in 0..23.
GPU_FN void fail_step(StepState& state, uint32_t code, uint32_t place, uint32_t call_index,
                      uint32_t detail) {
  atomic_set_once(&state.error, uint64_t{code} << 56 | uint64_t{place & 0xffffu} << 40 |
                                    uint64_t{call_index & 0xffffu} << 24 | (detail & 0xffffffu));
}
GPU_FN uint64_t load_volatile(const uint64_t* at) {
  return *static_cast<const volatile uint64_t*>(at);
}

// The same answer for all threads of the block.
GPU_FN bool has_step_failed(const StepState& state, StepScratch& scratch) {
  if (thread_index() == 0) scratch.answer.at(0) = load_volatile(&state.error) != 0 ? 1u : 0u;
  sync_block();
  const bool has_failed = scratch.answer.at(0) != 0;
  sync_block();
  return has_failed;
}

// 16 bytes a thread, eight times a turn: memory of the host answers after a microsecond, so that
// loads must be many on their way. Both at multiples of 16, capacities too.
GPU_FN void copy_units(unsigned char* to, const unsigned char* from, uint32_t num_bytes) {
  constexpr uint32_t kUnits = 8, kStep = kStepThreads * 16;
  for (uint32_t first = thread_index() * 16; first < num_bytes; first += kUnits * kStep) {
    Unit units[kUnits];
    GPU_UNROLL
    for (uint32_t i = 0; i < kUnits; ++i) {
      if (first + i * kStep < num_bytes) units[i] = load_16<Unit>(from + first + i * kStep);
    }
    GPU_UNROLL
    for (uint32_t i = 0; i < kUnits; ++i) {
      if (first + i * kStep < num_bytes)
        *reinterpret_cast<Unit*>(to + first + i * kStep) = units[i];
    }
  }
}

}  // namespace dflash::compute::gpu

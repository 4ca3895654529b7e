// How the kernels of a device step fail: the first failure stays in the step's state, and every
// later wait or publication returns at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/device_exchange/kernels/checksum.h"

namespace dflash::device_exchange {

// The shared memory of a block of the first two kernels.
struct StepScratch {
  ChecksumScratch sum;
  SharedArray<uint32_t, kMostStepTokens> tokens;  // the token of each row of a message
  SharedArray<uint32_t, 4> answer;                // what thread 0 found out, for all threads
};

GPU_FN void fail_step(StepState& state, ErrorCode code, uint32_t place, uint32_t call_index,
                      uint32_t detail) {
  atomic_set_once(&state.error, step_error(code, place, call_index, detail));
}
GPU_FN uint64_t load_volatile(const uint64_t* at) {
  return *static_cast<const volatile uint64_t*>(at);
}

// All threads of the block call it together and get the same answer.
GPU_FN bool has_step_failed(const StepState& state, StepScratch& scratch) {
  if (thread_index() == 0) scratch.answer.at(0) = load_volatile(&state.error) != 0 ? 1u : 0u;
  sync_block();
  const bool has_failed = scratch.answer.at(0) != 0;
  sync_block();
  return has_failed;
}

// Copies `num_bytes`, 16 bytes a thread and eight times a turn: memory of the host answers after a
// microsecond, so many loads must be on their way at once. Both addresses are multiples of 16, and
// both memories have room up to the next multiple behind `num_bytes`.
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

}  // namespace dflash::device_exchange

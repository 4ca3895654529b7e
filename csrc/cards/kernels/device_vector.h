// The vector type of compute/experts/activation.h for one thread of a device: the same IEEE
// operations in the same order as on the CPU.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"
#include "compute/experts/activation.h"

namespace dflash::compute::gpu {

struct DeviceVector {
  using F = float;
  using I = int32_t;
  GPU_FN static F set1(float value) { return value; }
  GPU_FN static F add(F a, F b) { return gpu::add(a, b); }
  GPU_FN static F sub(F a, F b) { return gpu::sub(a, b); }
  GPU_FN static F mul(F a, F b) { return gpu::mul(a, b); }
  GPU_FN static F div(F a, F b) { return gpu::div(a, b); }
  GPU_FN static F fma(F a, F b, F c) { return fused(a, b, c); }
  GPU_FN static F min(F a, F b) { return a < b ? a : b; }
  GPU_FN static F max(F a, F b) { return a > b ? a : b; }
  GPU_FN static F select_greater(F a, F b, F x, F y) { return a > b ? x : y; }
  GPU_FN static I bits(F value) { return static_cast<I>(bits_of(value)); }
  GPU_FN static I set1i(int32_t value) { return value; }
  GPU_FN static I subi(I a, I b) { return a - b; }
  GPU_FN static I halve(I a) { return a >> 1; }
  GPU_FN static F power_of_two(I n) { return float_of(static_cast<uint32_t>(n + 127) << 23); }
};

}  // namespace dflash::compute::gpu

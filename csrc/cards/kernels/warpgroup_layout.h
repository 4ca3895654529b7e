// The contract of products by warpgroups: 128 neighbouring threads, the first a multiple of 128,
// hold 64 x 128 float32 sums (rows x outputs) and add 16 inputs at a time out of two operands in
// shared memory, asynchronously. An operand is rows of 64 bf16 inputs, 128 bytes each, on a
// multiple of 1024 bytes; the 16-byte unit of row r and octet o (eight inputs) lies at
// units[operand_unit(r, o)]. Facts from the PTX ISA 9.0, section 9.7.15 "Asynchronous Warpgroup
// Level Matrix Multiply-Accumulate Instructions":
//
//   descriptor  bits 0-13 start address, 16-29 leading dimension byte offset, 32-45 stride
//               dimension byte offset, each (x & 0x3ffff) >> 4; 49-51 base offset, 0 where the
//               pattern begins at a multiple of 1024; 62-63 swizzle, 1: 128 bytes ("Matrix
//               Descriptor Format")
//   leading     of K-major operands in swizzled layouts unused, taken as 1 ("Leading Dimension
//               Byte Offset")
//   stride      of K-major operands from eight rows to the next eight: 1024 ("Stride Dimension
//               Byte Offset")
//   swizzle     bits 4-6 of an address xor its bits 7-9: Swizzle<3, 4, 3> over
//               ((8, m), (T, 2k)) : ((8T, SBO), (1, T)), T = 8 for bf16 ("Canonical Layouts"); of
//               the address itself, so that 16 inputs on are 32 bytes on in the start address
//   sums        thread t has rows t / 32 * 16 + t % 32 / 4 and 8 more, outputs 8 j + t % 4 * 2 and
//               the next, for all j (figure 149)
//   proxies     operands stored or copied by threads need fence.proxy.async by those threads, then
//               a barrier ("Async Proxy")
//   registers   wgmma.fence before the first product and after sums were touched; sums may be
//               touched again after wgmma.wait_group
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kWarpgroupThreads = 128;
inline constexpr uint32_t kWarpgroupRows = 64;
inline constexpr uint32_t kWarpgroupOutputs = 128;
// of a thread
inline constexpr uint32_t kWarpgroupSums = kWarpgroupRows * kWarpgroupOutputs / kWarpgroupThreads;
inline constexpr uint32_t kProductInputs = 16;
inline constexpr uint32_t kOperandOctets = 8;  // of a row: 128 bytes
// bytes: eight rows, after which the swizzle repeats
inline constexpr uint32_t kOperandAlignment = 1024;

GPU_FN constexpr uint32_t operand_unit(uint32_t row, uint32_t octet) {
  return row * kOperandOctets + (octet ^ row % 8);
}

// Of the operand whose row 0 lies at `address` in shared memory, from input 16 * `step` on.
GPU_FN constexpr uint64_t operand_descriptor(uint32_t address, uint32_t step) {
  constexpr uint64_t kLeading = 1, kStride = kOperandAlignment >> 4, kSwizzle128 = 1;
  return uint64_t{((address + step * kProductInputs * 2) & 0x3ffffu) >> 4} | kLeading << 16 |
         kStride << 32 | kSwizzle128 << 62;
}

struct WarpgroupSums {
  float values[kWarpgroupSums] = {};
};

// Where value i of the calling thread lies among the sums of its warpgroup.
GPU_FN uint32_t warpgroup_row(uint32_t i) {
  return thread_index() % kWarpgroupThreads / 32 * 16 + lane_index() / 4 + i / 2 % 2 * 8;
}
GPU_FN uint32_t warpgroup_output(uint32_t i) { return i / 4 * 8 + lane_index() % 4 * 2 + i % 2; }

}  // namespace dflash::compute::gpu

// The numbers that define the payload checksum (checksum.h says how they are put together), for
// the processor's code and for the kernels of cards. A header without the standard library's types.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash {

inline constexpr uint32_t kChecksumPolynomial = 0x82f63b78u;  // CRC-32C (Castagnoli), reflected
inline constexpr uint32_t kChecksumLanes = 4;                 // interleaved CRCs, word by word
inline constexpr uint32_t kChecksumWordBytes = 8;             // what a lane is fed at a time

// What the register of a lane (0 .. kChecksumLanes - 1) is multiplied by before the lanes are
// joined. The factors are odd and well mixed: four of xxHash's 32-bit primes (Yann Collet, BSD
// 2-Clause). A function and not an array, because device code has no address of a host's constant.
constexpr uint32_t checksum_lane_factor(uint32_t lane) {
  return lane == 0 ? 0x9e3779b1u : lane == 1 ? 0x85ebca77u : lane == 2 ? 0xc2b2ae3du : 0x27d4eb2fu;
}

}  // namespace dflash

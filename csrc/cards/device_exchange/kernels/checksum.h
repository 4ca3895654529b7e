// The wire's checksum (base/checksum.h) computed by a whole block. Each of its four lanes of
// CRC-32C is cut among 64 threads. A CRC is linear, so a thread's register can be moved to the end
// of the lane (multiplied by a power of x modulo the polynomial) and the moved registers be added
// up.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/checksum_definition.h"
#include "cards/device_exchange/step_params.h"
#include "cards/portable.h"

namespace dflash::device_exchange {

using namespace compute::gpu;  // the names of portable.h and of the kernels that this room takes
using compute::gpu::Unit;      // and not that of base/result.h

inline constexpr uint32_t kThreadsPerLane = kStepThreads / kChecksumLanes;

struct ChecksumScratch {
  SharedArray<uint32_t, 256> table;                           // the register after one byte
  SharedArray<uint32_t, kStepThreads / kSubgroupLanes> sums;  // a sub-group's share of its lane
  SharedArray<uint32_t, 1> result;
};

// Fills the table. All threads call it; the table may be used after the next barrier.
GPU_FN void fill_crc_table(ChecksumScratch& scratch) {
  uint32_t crc = thread_index();
  for (uint32_t bit = 0; bit < 8; ++bit)
    crc = crc >> 1 ^ ((crc & 1u) != 0 ? kChecksumPolynomial : 0u);
  scratch.table.at(thread_index()) = crc;
}

GPU_FN uint32_t feed_byte(uint32_t crc, uint32_t byte, ChecksumScratch& scratch) {
  return crc >> 8 ^ scratch.table.at((crc ^ byte) & 0xffu);
}
GPU_FN uint32_t feed_half(uint32_t crc, uint32_t half, ChecksumScratch& scratch) {
  crc ^= half;
  for (uint32_t byte = 0; byte < 4; ++byte) crc = crc >> 8 ^ scratch.table.at(crc & 0xffu);
  return crc;
}

// x^(64 * 2^k) modulo the polynomial: what moves a register over 2^k words. A switch, because the
// values are then part of the instructions and cost no memory access.
GPU_FN uint32_t power_of_words(uint32_t k) {
  switch (k) {
    case 0:  return 0x6ea2d55cu;
    case 1:  return 0x18b8ea18u;
    case 2:  return 0x510ac59au;
    case 3:  return 0xb82be955u;
    case 4:  return 0xb8fdb1e7u;
    case 5:  return 0x88e56f72u;
    case 6:  return 0x74c360a4u;
    case 7:  return 0xe4172b16u;
    case 8:  return 0x0d65762au;
    case 9:  return 0x35d73a62u;
    case 10: return 0x28461564u;
    case 11: return 0xbf455269u;
    case 12: return 0xe2ea32dcu;
    case 13: return 0xfe7740e6u;
    case 14: return 0xf946610bu;
    case 15: return 0x3c204f8fu;
    case 16: return 0x538586e3u;
    case 17: return 0x59726915u;
    case 18: return 0x734d5309u;
    case 19: return 0xbc1ac763u;
    case 20: return 0x7d0722ccu;
    case 21: return 0xd289cabeu;
    case 22: return 0xe94ca9bcu;
    case 23: return 0x05b74f3fu;
    default: return 0x80000000u;
  }
}

// The product of two registers as polynomials, modulo the checksum's.
GPU_FN uint32_t multiply_modulo(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0; bit < 32; ++bit) {
    if ((a & 0x80000000u >> bit) != 0) product ^= b;
    b = b >> 1 ^ ((b & 1u) != 0 ? kChecksumPolynomial : 0u);
  }
  return product;
}

// The register after `num_words` words of zeros.
GPU_FN uint32_t skip_words(uint32_t crc, uint32_t num_words) {
  for (uint32_t k = 0; num_words != 0; ++k, num_words >>= 1) {
    if ((num_words & 1u) != 0) crc = multiply_modulo(crc, power_of_words(k));
  }
  return crc;
}

// The checksum of `num_bytes` (below 2^32) from an address that is a multiple of 8 on; memory must
// be readable up to the next such multiple behind them. All threads of the block call it together,
// with the table filled, and all get the result.
GPU_FN uint32_t block_checksum(const unsigned char* bytes, uint32_t num_bytes,
                               ChecksumScratch& scratch) {
  const uint32_t* halves = reinterpret_cast<const uint32_t*>(bytes);
  const uint32_t lane = thread_index() / kThreadsPerLane, place = thread_index() % kThreadsPerLane;
  const uint32_t num_words = num_bytes / kChecksumWordBytes,
                 own = (num_words + kChecksumLanes - 1 - lane) / kChecksumLanes;
  const uint32_t each = (own + kThreadsPerLane - 1) / kThreadsPerLane;
  const uint32_t begin = place * each < own ? place * each : own,
                 end = begin + each < own ? begin + each : own;
  uint32_t crc = place == 0 ? ~0u : 0u;
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t word = i * kChecksumLanes + lane;
    crc = feed_half(feed_half(crc, halves[2 * word], scratch), halves[2 * word + 1], scratch);
  }
  crc = skip_words(crc, own - end);
  for (uint32_t step = 1; step < kSubgroupLanes; step *= 2)
    crc ^= shuffle(crc, lane_index() ^ step);
  if (lane_index() == 0) scratch.sums.at(subgroup_index()) = crc;
  sync_block();
  if (thread_index() == 0) {
    uint32_t summary = ~0u;
    for (uint32_t i = 0; i < kChecksumLanes; ++i) {
      uint32_t sum = scratch.sums.at(2 * i) ^ scratch.sums.at(2 * i + 1);
      if (i == num_words % kChecksumLanes) {
        for (uint32_t at = num_words * kChecksumWordBytes; at < num_bytes; ++at)
          sum = feed_byte(sum, halves[at / 4] >> at % 4 * 8 & 0xffu, scratch);
      }
      summary = feed_half(summary, sum * checksum_lane_factor(i), scratch);
    }
    scratch.result.at(0) = ~feed_half(feed_half(summary, num_bytes, scratch), 0, scratch);
  }
  sync_block();
  // The next call writes the result only after its own first barrier, and the sums after the
  // barrier above, so no thread reads what is overwritten.
  return scratch.result.at(0);
}

}  // namespace dflash::device_exchange

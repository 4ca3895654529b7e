// The pulse is what a worker sends on a connection of its own to prove that it makes progress. The
// decoder is total. The time between two pulses is part of the protocol, because the host's limits
// are multiples of it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace dflash::wire {

// A pulse is little-endian: magic u32, version u32, progress counter u64.
inline constexpr uint32_t kPulseMagic = 0x534c5550;  // "PULS"
inline constexpr uint32_t kPulseVersion = 1;
inline constexpr size_t kPulseBytes = 16;
inline constexpr int kPulsePeriodMs = 100;  // a tenth of the shortest stall limit that makes sense

void encode_pulse(uint64_t counter, std::span<std::byte, kPulseBytes> out);
// Returns the counter, or nothing where the bytes are no pulse of this version.
std::optional<uint64_t> decode_pulse(std::span<const std::byte, kPulseBytes> bytes);

}  // namespace dflash::wire

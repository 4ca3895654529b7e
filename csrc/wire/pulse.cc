// The codec of the pulse. Its numbers are little-endian on every machine.
// SPDX-License-Identifier: Apache-2.0
#include "wire/pulse.h"

#include "wire/little_endian.h"

namespace dflash::wire {

void encode_pulse(uint64_t counter, std::span<std::byte, kPulseBytes> out) {
  store_le(kPulseMagic, out, 0);
  store_le(kPulseVersion, out, 4);
  store_le(counter, out, 8);
}

std::optional<uint64_t> decode_pulse(std::span<const std::byte, kPulseBytes> bytes) {
  if (load_le<uint32_t>(bytes, 0) != kPulseMagic || load_le<uint32_t>(bytes, 4) != kPulseVersion)
    return std::nullopt;
  return load_le<uint64_t>(bytes, 8);
}

}  // namespace dflash::wire

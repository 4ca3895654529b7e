// Little-endian loads and stores at byte offsets. The codecs use them instead of casts to structs,
// which would depend on padding and byte order.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dflash::wire {

// The caller guarantees that offset + sizeof(T) <= bytes.size(). Compilers turn either loop into
// one move on little-endian machines.
template <std::unsigned_integral T>
T load_le(std::span<const std::byte> bytes, size_t offset) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i)
    value |= std::to_integer<uint64_t>(bytes[offset + i]) << (8 * i);
  return static_cast<T>(value);
}

template <std::unsigned_integral T>
void store_le(T value, std::span<std::byte> bytes, size_t offset) {
  for (size_t i = 0; i < sizeof(T); ++i)
    bytes[offset + i] = static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i));
}

}  // namespace dflash::wire

// Fields of a frame header in the device's memory, by their offsets in wire/frame_layout.h. Cards
// are little-endian, as the wire is, and the offsets are multiples of the fields' sizes, so that a
// field is one load or one store.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"
#include "wire/frame_layout.h"

namespace dflash::device_exchange {

namespace frame_offset = wire::frame_offset;

template <class T>
GPU_FN T load_field(const unsigned char* header, uint32_t offset) {
  return *reinterpret_cast<const T*>(header + offset);
}
// The same of memory that a peer may be writing: the load happens here, and once.
template <class T>
GPU_FN T load_field_again(const unsigned char* header, uint32_t offset) {
  return *reinterpret_cast<const volatile T*>(header + offset);
}
template <class T>
GPU_FN void store_field(unsigned char* header, uint32_t offset, T value) {
  *reinterpret_cast<T*>(header + offset) = value;
}

}  // namespace dflash::device_exchange

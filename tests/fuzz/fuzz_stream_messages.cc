// Any bytes a peer sends over a stream, cut into reads of any size, give messages inside their
// slots or a protocol error that stays. The first byte of the input chooses the size of the reads.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "transport/stream/assembler.h"

namespace {

using namespace dflash;

constexpr uint32_t kNumSlots = 4;
constexpr uint64_t kSlotBytes = 512;

void require(bool holds) {
  if (!holds) std::abort();  // a finding
}

// Takes messages until there are none; false after an error.
bool drain(transport::Assembler& assembler, std::span<const std::byte> slots) {
  for (;;) {
    const auto next = assembler.next();
    if (!next.ok()) {
      require(next.error().code == ErrorCode::kProtocol && !next.error().message.empty());
      require(!assembler.next().ok());
      return false;
    }
    if (!next.value()) return true;
    const transport::Arrival& arrival = *next.value();
    require(arrival.slot < kNumSlots && arrival.bytes.size() <= kSlotBytes);
    require(arrival.bytes.data() == slots.data() + arrival.slot * kSlotBytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  if (num_bytes == 0) return 0;
  const size_t read_bytes = 1 + data[0];
  std::vector<std::byte> slots(kNumSlots * kSlotBytes);
  transport::Assembler assembler(slots, kNumSlots, kSlotBytes);
  for (size_t given = 1; given < num_bytes;) {
    if (!drain(assembler, slots)) return 0;
    const transport::Assembler::Room room = assembler.room();
    const size_t piece =
        std::min({read_bytes, num_bytes - given, room.slot.size() + room.staging.size()});
    require(piece > 0);
    const size_t into_slot = std::min(piece, room.slot.size());
    if (into_slot > 0) std::memcpy(room.slot.data(), data + given, into_slot);
    if (piece > into_slot)
      std::memcpy(room.staging.data(), data + given + into_slot, piece - into_slot);
    assembler.filled(piece);
    given += piece;
  }
  drain(assembler, slots);
  return 0;
}

// The offsets of a segment and its header line: magic u32, version u32, generation u64, writer u32,
// num_slots u32, request_bytes u64, reply_bytes u64. They have the native byte order, because both
// processes run on one machine.
// SPDX-License-Identifier: Apache-2.0
#include "transport/ring/layout.h"

#include <bit>
#include <cstring>
#include <string>

namespace dflash::transport {
namespace {

constexpr uint64_t kPageBytes = 4096;

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

struct HeaderLine {
  uint32_t magic = kSegmentMagic;
  uint32_t version = kSegmentVersion;
  uint64_t generation = 0;
  uint32_t writer = 0;
  uint32_t num_slots = 0;
  uint64_t request_bytes = 0;
  uint64_t reply_bytes = 0;
};
static_assert(sizeof(HeaderLine) == 40, "the header line has no padding");

Status check_slot_bytes(const char* field, uint64_t found) {
  if (found >= 64 && found <= kMaxSlotBytes && found % 64 == 0) return ok();
  return Error{ErrorCode::kInvalidArgument,
               std::string("slot geometry: ") + field + " is " + std::to_string(found) +
                   "; allowed: a multiple of 64 up to " + std::to_string(kMaxSlotBytes)};
}

}  // namespace

Status check_geometry(const SlotGeometry& geometry) {
  if (geometry.num_slots < 1 || geometry.num_slots > kMaxSlots) {
    return Error{ErrorCode::kInvalidArgument, "slot geometry: num_slots is " +
                                                  std::to_string(geometry.num_slots) +
                                                  "; allowed: 1.." + std::to_string(kMaxSlots)};
  }
  DFLASH_TRY(check_slot_bytes("request_bytes", geometry.request_bytes));
  return check_slot_bytes("reply_bytes", geometry.reply_bytes);
}

Result<SegmentLayout> SegmentLayout::of(Side writer, const SlotGeometry& geometry) {
  DFLASH_TRY(check_geometry(geometry));
  // 256 slots of 256 MiB are 64 GiB, so that nothing here can wrap 64 bits.
  SegmentLayout layout;
  const uint32_t num_entries = std::bit_ceil(geometry.num_slots);
  layout.entry_mask = num_entries - 1;
  layout.slot_bytes = writer == Side::kHost ? geometry.request_bytes : geometry.reply_bytes;
  layout.slot_stride = round_up(layout.slot_bytes, kLineBytes);
  layout.slots_offset = round_up(kEntriesOffset + num_entries * kEntryBytes, kLineBytes);
  layout.total_bytes =
      round_up(layout.slots_offset + layout.slot_stride * geometry.num_slots, kPageBytes);
  return layout;
}

void write_segment_header(std::byte* base, Side writer, const SlotGeometry& geometry,
                          uint64_t generation) {
  HeaderLine line;
  line.generation = generation;
  line.writer = static_cast<uint32_t>(writer);
  line.num_slots = geometry.num_slots;
  line.request_bytes = geometry.request_bytes;
  line.reply_bytes = geometry.reply_bytes;
  std::memcpy(base, &line, sizeof line);
}

Status check_segment_header(const std::byte* base, Side writer, const SlotGeometry& geometry,
                            uint64_t generation) {
  HeaderLine line;
  std::memcpy(&line, base, sizeof line);
  struct Field {
    const char* name;
    uint64_t found, agreed;
  };
  const Field fields[] = {
      {"magic",         line.magic,         kSegmentMagic                },
      {"version",       line.version,       kSegmentVersion              },
      {"generation",    line.generation,    generation                   },
      {"writer",        line.writer,        static_cast<uint64_t>(writer)},
      {"num_slots",     line.num_slots,     geometry.num_slots           },
      {"request_bytes", line.request_bytes, geometry.request_bytes       },
      {"reply_bytes",   line.reply_bytes,   geometry.reply_bytes         },
  };
  for (const Field& field : fields) {
    if (field.found == field.agreed) continue;
    return Error{ErrorCode::kProtocol,
                 std::string("shared segment: ") + field.name + " is " +
                     std::to_string(field.found) +
                     "; agreed in the handshake: " + std::to_string(field.agreed)};
  }
  return ok();
}

}  // namespace dflash::transport

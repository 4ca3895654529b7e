// Whatever a peer writes into its ring's words, polling and publishing give arrivals inside its
// slots or a typed error. Input: steps of 5 bytes, a word's index and its value, each followed by a
// poll and a publish.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "transport/ring/layout.h"
#include "transport/ring/mapping.h"
#include "transport/ring/ring_channel.h"

namespace {

using namespace dflash;
using namespace dflash::transport;

constexpr SlotGeometry kGeometry{3, 64, 128};

void require(bool holds) {
  if (!holds) std::abort();  // a finding
}

struct Memory {
  Mapping own, peer;
};

void examine(Channel& host, const Memory& memory, const SegmentLayout& layout) {
  const auto polled = host.poll();
  if (!polled.ok()) {
    require(polled.error().code == ErrorCode::kProtocol ||
            polled.error().code == ErrorCode::kWorkerLost);
  } else if (polled.value()) {
    const Arrival& arrival = *polled.value();
    require(arrival.slot < kGeometry.num_slots && arrival.bytes.size() <= kGeometry.reply_bytes);
    require(arrival.bytes.data() ==
            memory.peer.base() + layout.slots_offset + arrival.slot * layout.slot_stride);
  }
  const auto published = host.publish(1, 64);
  require(published.ok() || published.error().code == ErrorCode::kWorkerLost);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const auto own = SegmentLayout::of(Side::kHost, kGeometry).value();
  const auto peer = SegmentLayout::of(Side::kWorker, kGeometry).value();
  auto memory = std::make_shared<Memory>(
      Memory{Mapping::create(own.total_bytes).value(), Mapping::create(peer.total_bytes).value()});
  RingEnds ends;
  ends.side = Side::kHost;
  ends.geometry = kGeometry;
  ends.kind = "shared";
  ends.own = memory->own.base();
  ends.peer = memory->peer.base();
  ends.memory = memory;
  const auto host = make_ring_channel(std::move(ends));
  // Head, sleeping word and the words of the four entries; nothing else of the peer's is read.
  const uint64_t words[] = {kHeadOffset, kSleepingOffset, kEntriesOffset, kEntriesOffset + 8,
                            kEntriesOffset + 12};
  for (; num_bytes >= 5; data += 5, num_bytes -= 5) {
    const uint64_t entry = data[0] / 5 % 4 * kEntryBytes;
    const uint64_t word = words[data[0] % 5];
    std::memcpy(memory->peer.base() + word + (word >= kEntriesOffset ? entry : 0), data + 1, 4);
    examine(*host, *memory, peer);
  }
  return 0;
}

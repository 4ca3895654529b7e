// The transport contract: slots of bytes between two processes, in both directions. A transport
// never sees a message, only slot numbers and byte counts; wire/ never sees a descriptor. One
// implementation per folder; the conformance suite (tests/csrc/transport) runs against every one of
// them.
//
// Credit rule (kept by the callers, not by the channel): slot i carries at most one request and
// then its reply. The host publishes slot i only while it owns credit i; the worker publishes slot
// i only in answer to request i. Therefore at most num_slots messages are ever under way in one
// direction and publish() never has to wait for room.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/clock.h"
#include "base/result.h"

namespace dflash::transport {

// Agreed in the handshake before the channel exists; both ends hold the same values.
struct SlotGeometry {
  uint32_t num_slots = 0;      // 1..kMaxSlots
  uint64_t request_bytes = 0;  // capacity of one request slot, a multiple of 64
  uint64_t reply_bytes = 0;    // capacity of one reply slot, a multiple of 64
};
inline constexpr uint32_t kMaxSlots = 256;  // bound of the ring's entry table
// a slot never exceeds the whole arena's default cap
inline constexpr uint64_t kMaxSlotBytes = 256ull << 20;

enum class Side : uint8_t { kHost, kWorker };  // the host sends requests, the worker sends replies

struct Arrival {
  uint32_t slot;
  // for ring transports peer-writable memory: copy before validating
  std::span<const std::byte> bytes;
};

// What to sleep on until the channel may have something new. Exactly one of the two is meant.
struct WakeSource {
  const uint32_t* futex_word = nullptr;  // shared futex; sleep while *futex_word == expected
  uint32_t expected = 0;
  int fd = -1;       // else poll this descriptor ...
  short events = 0;  // ... for these events
  // fd stays ready until poll() has taken everything: no poll() needed after arm()
  bool is_level_triggered = false;
};
enum class SleepKind : uint8_t { kFutex, kPoll };

// The memory under a ring (transport/ring/layout.h), for a device that publishes and takes messages
// by itself. Heads are in units of the head word: twice the number of messages.
struct RingView {
  std::byte* own = nullptr;
  std::byte* peer = nullptr;
  bool is_peer_writable = false;  // how it is mapped, whoever writes it
  uint64_t own_bytes = 0, peer_bytes = 0;
  uint64_t own_slots = 0, own_stride = 0;  // offset of slot 0, and from slot to slot
  uint64_t peer_slots = 0, peer_stride = 0;
  uint32_t entry_mask = 0;
  uint32_t head = 0, tail = 0;   // published, consumed
  std::shared_ptr<void> memory;  // keeps both mapped
};

// Not thread-safe: one thread at a time (the client's progress lock, the worker's serve thread).
class Channel {
 public:
  virtual ~Channel() = default;
  virtual const SlotGeometry& geometry() const = 0;
  virtual const char* kind() const = 0;  // "loopback" "shared" "unix" "tcp"

  // This side's outgoing slot, writable from credit acquisition until publish(). 64-byte aligned.
  virtual std::span<std::byte> outgoing(uint32_t slot) = 0;
  // Hands over the first `bytes` of outgoing slot `slot`. Never blocks; a socket that is full keeps
  // the rest for poll(). Errors: kWorkerLost when the peer is gone, kInvalidArgument on a slot or
  // length out of range.
  virtual Status publish(uint32_t slot, size_t bytes) = 0;
  // Moves bytes in both directions without blocking and returns the next complete incoming message,
  // oldest first. The bytes stay valid until the next message arrives in the same slot. Errors:
  // kProtocol when the peer's index, slot or length is out of range; kWorkerLost on hang-up.
  virtual Result<std::optional<Arrival>> poll() = 0;

  // Announces that this side is about to sleep and says on what. `kind` is a wish: sockets always
  // answer with a descriptor, ring transports honour both. After arm(), poll() must be called once
  // more before sleeping (lost wake-up otherwise), unless the source is level-triggered and poll()
  // returned nothing just before.
  virtual WakeSource arm(SleepKind kind) = 0;
  virtual void disarm() = 0;
  // Earliest time at which poll() can return something without outside help (emulated delays);
  // max() when none.
  virtual int64_t next_event_ns() const { return std::numeric_limits<int64_t>::max(); }

  // Its ring, where there is one. Whoever uses that must say how far before this channel is used
  // again.
  virtual std::optional<RingView> ring() const { return std::nullopt; }
  virtual void set_ring(uint32_t /*head*/, uint32_t /*tail*/) {}
};

// Spins on poll() of every channel for up to `spin_ns`, then sleeps until one of them may have
// something, the deadline passes, or `wake_fd` (-1: none) becomes readable. Returns as soon as any
// poll() produced an arrival, which it stores in `arrivals[i]`; entries that are already filled
// make it return at once. Errors of one channel are stored in `errors[i]` and end the wait.
// Channels may be null (skipped).
struct WaitEntry {
  Channel* channel = nullptr;
  std::optional<Arrival> arrival;
  std::optional<Error> error;
};
void wait_any(std::span<WaitEntry> entries, Deadline deadline, int64_t spin_ns, int wake_fd = -1);

}  // namespace dflash::transport

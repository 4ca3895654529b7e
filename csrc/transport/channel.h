// The transport contract: slots of bytes between two processes, in both directions. A transport
// never sees a message, only slot numbers and byte counts; wire/ never sees a descriptor. Each
// folder has one implementation, and the conformance suite (tests/csrc/transport) runs against
// every one.
//
// The credit rule is kept by the callers, not by the channel. Slot i carries at most one request
// and then its reply. The host publishes slot i only while it owns credit i, and the worker
// publishes slot i only in answer to request i. Therefore at most num_slots messages are ever under
// way in one direction, and publish() never has to wait for room.
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
inline constexpr uint32_t kMaxSlots = 256;  // bounds the ring's table of entries
// A slot never exceeds the default cap of the whole arena.
inline constexpr uint64_t kMaxSlotBytes = 256ull << 20;

enum class Side : uint8_t { kHost, kWorker };  // the host sends requests, the worker sends replies

// A message that has come in.
struct Arrival {
  uint32_t slot;
  // With ring transports, the peer can write this memory: copy it before validating.
  std::span<const std::byte> bytes;
};

// What to sleep on until the channel may have something new: either a futex or a descriptor.
struct WakeSource {
  const uint32_t* futex_word = nullptr;  // a shared futex; sleep while *futex_word == expected
  uint32_t expected = 0;
  int fd = -1;       // where there is no futex, the descriptor to poll ...
  short events = 0;  // ... and for which events
  // Whether fd stays ready until poll() has taken everything, which makes a poll() after arm()
  // unnecessary.
  bool is_level_triggered = false;
};
enum class SleepKind : uint8_t { kFutex, kPoll };

// Not thread-safe. One thread uses it at a time: whoever holds the client's turn, or the worker's
// serving thread.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual const SlotGeometry& geometry() const = 0;
  virtual const char* kind() const = 0;  // "loopback", "shared", "unix", "tcp" or "fabric"

  // This side's outgoing slot, 64-byte aligned and writable from the acquisition of its credit
  // until publish().
  virtual std::span<std::byte> outgoing(uint32_t slot) = 0;
  // Hands over the first `bytes` bytes of outgoing slot `slot`. Never blocks; what a full socket
  // does not take is left to poll(). Errors: kWorkerLost where the peer is gone, kInvalidArgument
  // on a slot or length out of range.
  virtual Status publish(uint32_t slot, size_t bytes) = 0;
  // Moves bytes in both directions without blocking, and returns the next complete incoming
  // message, oldest first. Its bytes stay valid until this side publishes in the same slot, or the
  // next message arrives there. Errors: kProtocol where the peer's index, slot or length is out of
  // range, kWorkerLost on hang-up.
  virtual Result<std::optional<Arrival>> poll() = 0;

  // Announces that this side is about to sleep, and says on what. `kind` is a wish: sockets always
  // answer with a descriptor, ring transports honour both. After arm(), poll() must be called once
  // more before sleeping, or a wake-up is lost; the exception is a level-triggered source whose
  // poll() has just returned nothing.
  virtual WakeSource arm(SleepKind kind) = 0;
  virtual void disarm() = 0;
  // The earliest time at which poll() can return something without outside help, as after an
  // emulated delay; max() where there is none.
  virtual int64_t next_event_ns() const { return std::numeric_limits<int64_t>::max(); }
};

// Spins on poll() of every channel for up to `spin_ns`, then sleeps until one of them may have
// something, the deadline passes, or `wake_fd` becomes readable (-1 stands for none). Returns as
// soon as any poll() has produced an arrival or an error, which it stores in the entry. An entry
// that is already filled makes it return at once. Entries whose channel is null are skipped. A
// caller who expects nothing before `quiet_until_ns` has it sleep until then before it spins.
struct WaitEntry {
  Channel* channel = nullptr;
  std::optional<Arrival> arrival;
  std::optional<Error> error;
  // A socket of the same peer, whose end of stream also ends the sleep: a process that is killed
  // publishes nothing, but its sockets hang up within a millisecond. Data on it wakes nobody. -1
  // stands for none.
  int hangup_fd = -1;
  bool has_hung_up = false;
};
void wait_any(std::span<WaitEntry> entries, Deadline deadline, int64_t spin_ns, int wake_fd = -1,
              int64_t quiet_until_ns = 0);

}  // namespace dflash::transport

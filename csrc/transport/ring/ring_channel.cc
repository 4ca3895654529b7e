// The ring. To send a message is to write the slot, then the entry, then to store the head. Nothing
// that is read from the peer is trusted: the head may be at most num_slots ahead, a slot must be
// below num_slots, and a length at most the slot's capacity.
//
// Sleeping is a Dekker pair. The sleeper stores its sleeping word and then loads the head; the
// publisher stores the head and then loads the sleeping word. All four are sequentially consistent,
// so that at least one side sees the other and no wake-up is lost.
// SPDX-License-Identifier: Apache-2.0
#include "transport/ring/ring_channel.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <string>

#include "transport/ring/layout.h"
#include "transport/ring_lender.h"

namespace dflash::transport {
namespace {

template <class T>
std::atomic_ref<T> shared_word(std::byte* base, uint64_t offset) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(base + offset));
}
// atomic_ref has no const form in C++20. Only loads are made through this one, so that a read-only
// mapping suffices.
template <class T>
T load_shared(const std::byte* base, uint64_t offset, std::memory_order order) {
  return shared_word<T>(const_cast<std::byte*>(base), offset).load(order);
}

class RingChannel final : public Channel, public RingLender {
 public:
  explicit RingChannel(RingEnds ends)
      : ends_(std::move(ends)),
        out_(SegmentLayout::of(ends_.side, ends_.geometry).value()),
        in_(SegmentLayout::of(ends_.side == Side::kHost ? Side::kWorker : Side::kHost,
                              ends_.geometry)
                .value()) {}
  ~RingChannel() override { publish_head(head_ | kClosedBit); }
  RingChannel(const RingChannel&) = delete;
  RingChannel& operator=(const RingChannel&) = delete;

  const SlotGeometry& geometry() const override { return ends_.geometry; }
  const char* kind() const override { return ends_.kind; }

  std::span<std::byte> outgoing(uint32_t slot) override {
    check(slot < ends_.geometry.num_slots, "outgoing slot out of range");
    return {ends_.own + out_.slots_offset + slot * out_.slot_stride, out_.slot_bytes};
  }

  RingView ring() const override {
    return RingView{ends_.own,
                    const_cast<std::byte*>(ends_.peer),
                    ends_.is_peer_writable,
                    out_.total_bytes,
                    in_.total_bytes,
                    out_.slots_offset,
                    out_.slot_stride,
                    in_.slots_offset,
                    in_.slot_stride,
                    out_.entry_mask,
                    head_,
                    tail_,
                    ends_.memory};
  }
  void set_ring(uint32_t head, uint32_t tail) override {
    head_ = head;
    tail_ = tail;
  }

  Status publish(uint32_t slot, size_t bytes) override {
    if (slot >= ends_.geometry.num_slots || bytes > out_.slot_bytes)
      return refuse_publish(slot, bytes);
    if ((load_shared<uint32_t>(ends_.peer, kHeadOffset, std::memory_order_relaxed) & kClosedBit) !=
        0)
      return peer_closed();
    const uint64_t entry = kEntriesOffset + ((head_ / kOneMessage) & out_.entry_mask) * kEntryBytes;
    // Relaxed: the store of the head publishes entry and slot.
    shared_word<uint32_t>(ends_.own, entry + kEntrySlotOffset)
        .store(slot, std::memory_order_relaxed);
    shared_word<uint64_t>(ends_.own, entry + kEntryLengthOffset)
        .store(bytes, std::memory_order_relaxed);
    head_ += kOneMessage;
    publish_head(head_);
    return ok();
  }

  Result<std::optional<Arrival>> poll() override {
    if (broken_) return *broken_;
    // Sequentially consistent for the Dekker pair above; it also acquires entry and slot.
    const uint32_t head = load_shared<uint32_t>(ends_.peer, kHeadOffset, std::memory_order_seq_cst);
    if (head == tail_) return std::optional<Arrival>();
    const uint32_t ahead = (head - tail_) / kOneMessage;
    if (ahead == 0) return peer_closed();
    return take_next(ahead);
  }

  WakeSource arm(SleepKind kind) override {
    WakeSource source;
    if (kind == SleepKind::kPoll && ends_.own_bell.is_open()) {
      set_sleeping(SleepState::kPoll);
      source.fd = ends_.own_bell.get();
      source.events = POLLIN;
    } else {
      set_sleeping(SleepState::kFutex);
      source.futex_word = reinterpret_cast<const uint32_t*>(ends_.peer + kHeadOffset);
      source.expected = tail_;
    }
    return source;
  }

  void disarm() override {
    if (sleeping_ == SleepState::kPoll) {
      uint64_t rings;
      // The bell does not block; "nothing to read" is as good as a ring. A ring for another channel
      // on the same bell is not lost, because a waiter polls every channel after it has disarmed.
      [[maybe_unused]] const ssize_t got = ::read(ends_.own_bell.get(), &rings, sizeof rings);
    }
    if (sleeping_ != SleepState::kAwake) set_sleeping(SleepState::kAwake);
  }

 private:
  Result<std::optional<Arrival>> take_next(uint32_t ahead) {
    if (ahead > ends_.geometry.num_slots)
      return break_with("head", ahead, ends_.geometry.num_slots);
    const uint64_t entry = kEntriesOffset + ((tail_ / kOneMessage) & in_.entry_mask) * kEntryBytes;
    const uint32_t slot =
        load_shared<uint32_t>(ends_.peer, entry + kEntrySlotOffset, std::memory_order_relaxed);
    const uint64_t bytes =
        load_shared<uint64_t>(ends_.peer, entry + kEntryLengthOffset, std::memory_order_relaxed);
    if (slot >= ends_.geometry.num_slots)
      return break_with("slot", slot, ends_.geometry.num_slots - 1);
    if (bytes > in_.slot_bytes) return break_with("length", bytes, in_.slot_bytes);
    tail_ += kOneMessage;
    return std::optional<Arrival>(Arrival{
        slot, {ends_.peer + in_.slots_offset + slot * in_.slot_stride, bytes}
    });
  }

  void set_sleeping(SleepState state) {
    sleeping_ = state;
    shared_word<uint32_t>(ends_.own, kSleepingOffset)
        .store(static_cast<uint32_t>(state), std::memory_order_seq_cst);
  }

  // Publishes everything written before it, and wakes the peer if it sleeps.
  void publish_head(uint32_t head) {
    shared_word<uint32_t>(ends_.own, kHeadOffset).store(head, std::memory_order_seq_cst);
    const uint32_t sleeping =
        load_shared<uint32_t>(ends_.peer, kSleepingOffset, std::memory_order_seq_cst);
    if (sleeping == static_cast<uint32_t>(SleepState::kFutex)) {
      ::syscall(SYS_futex, ends_.own + kHeadOffset, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    } else if (sleeping == static_cast<uint32_t>(SleepState::kPoll) && ends_.peer_bell.is_open()) {
      const uint64_t one = 1;
      // The write fails on a full counter, which means that the bell is ringing already.
      [[maybe_unused]] const ssize_t put = ::write(ends_.peer_bell.get(), &one, sizeof one);
    }
  }

  Error peer_closed() const {
    return {ErrorCode::kWorkerLost, std::string(ends_.kind) + " channel: the peer closed its end"};
  }
  Error refuse_publish(uint32_t slot, size_t bytes) const {
    return {ErrorCode::kInvalidArgument,
            std::string(ends_.kind) + " channel: publish of " + std::to_string(bytes) +
                " bytes in slot " + std::to_string(slot) + "; there are " +
                std::to_string(ends_.geometry.num_slots) + " slots of " +
                std::to_string(out_.slot_bytes) + " bytes"};
  }
  Error break_with(const char* what, uint64_t found, uint64_t most) {
    broken_ = Error{ErrorCode::kProtocol, std::string(ends_.kind) + " channel: the peer's " + what +
                                              " is " + std::to_string(found) +
                                              "; allowed: at most " + std::to_string(most)};
    return *broken_;
  }

  RingEnds ends_;
  SegmentLayout out_, in_;
  // What was published, in units of the head word. The shared word is never read back.
  uint32_t head_ = 0;
  uint32_t tail_ = 0;  // what was consumed of the peer's, in the same units; its low bit stays 0
  SleepState sleeping_ = SleepState::kAwake;
  std::optional<Error> broken_;
};

}  // namespace

std::unique_ptr<Channel> make_ring_channel(RingEnds ends) {
  return std::make_unique<RingChannel>(std::move(ends));
}

}  // namespace dflash::transport

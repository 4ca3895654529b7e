// A data path: the channel to one worker under one generation, the credits of its slots, and what
// may be done with it (PathState). It ends by renewal, which brings another channel and generation.
// Whoever has the turn (turn.h) uses it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/call.h"
#include "client/types.h"

namespace dflash::client {

// A path with fewer usable slots is worn: one slice could not travel while another is computed.
inline constexpr uint32_t kLeastUsableSlots = 2;

// A slot whose call ended before its reply came. The worker may still write there, so the credit
// stays away until the very reply that was asked for arrives, or the path is renewed.
struct Quarantine {
  uint64_t call_id = 0;
  uint32_t layer = 0, shard = 0;
  uint16_t slice = 0;
};

struct Slot {
  Slice* slice = nullptr;  // in flight
  std::optional<Quarantine> quarantine;
  bool is_free() const { return slice == nullptr && !quarantine; }
};

class Path {
 public:
  explicit Path(NewPath path);

  PathState state() const;
  // Why it is worn or lost; empty otherwise.
  std::string reason() const;
  bool is_lost() const { return channel_ == nullptr; }
  uint64_t generation() const { return generation_; }
  // Null once lost.
  transport::Channel* channel() const { return channel_.get(); }
  const transport::SlotGeometry& geometry() const { return channel_->geometry(); }

  // -- credits --
  // A slot for one more slice while fewer than `window` are in flight; none on a retired path.
  std::optional<uint32_t> free_slot(uint32_t window) const;
  void put_in_flight(uint32_t slot, Slice* slice);
  // The reply that was asked for in this slot was consumed.
  void release(uint32_t slot);
  // The slice's call ended without its reply.
  void quarantine(uint32_t slot);
  void quarantine_all_of(const Call& call);
  const Slot* slot(uint32_t index) const {
    return index < slots_.size() ? &slots_[index] : nullptr;
  }

  uint32_t num_in_flight() const { return num_in_flight_; }
  uint32_t num_quarantined() const { return num_quarantined_; }
  bool owes() const { return num_in_flight_ > 0; }
  // Whether a message may arrive. Nobody listens to a retired path: its worker may already have
  // closed its end, and that would look like a hang-up.
  bool is_listening() const {
    return channel_ != nullptr && !is_retired_ && (num_in_flight_ > 0 || num_quarantined_ > 0);
  }

  // -- states --
  // No call is cut for it any more until it is renewed.
  void wear_out(std::string reason);
  // Worn, nothing in flight, and nobody has begun to renew it.
  bool is_ready_to_retire() const {
    return !is_retired_ && num_in_flight_ == 0 && state() == PathState::kWorn;
  }
  // Somebody renews it from here on: nothing is sent or taken, even if a late reply frees a slot.
  void retire(std::string reason);
  bool is_retired() const { return is_retired_; }
  void renew(NewPath path);
  void lose(std::string reason);
  // For a device step, on a path that is fresh or in use and owes nothing.
  void lease() { is_leased_ = true; }
  // `used`: how far the device used the ring; none: unknown, and the path is worn.
  void end_lease(const RingUse* used, bool has_failed);

 private:
  bool lacks_slots() const {
    return slots_.size() - num_quarantined_ < kLeastUsableSlots && num_quarantined_ > 0;
  }

  std::unique_ptr<transport::Channel> channel_;  // null: lost
  uint64_t generation_ = 0;
  std::vector<Slot> slots_;
  uint32_t num_in_flight_ = 0;
  uint32_t num_quarantined_ = 0;
  bool has_sent_ = false;
  bool is_leased_ = false;
  bool is_worn_ = false;  // for another reason than missing slots
  bool is_retired_ = false;
  std::string reason_;
};

}  // namespace dflash::client

// A data path: the channel to one worker under one generation, the credits of its slots, and what
// may be done with it (PathState). It ends when it is renewed, which brings another channel and
// another generation. Whoever has the turn (turn.h) uses it.
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

// A path with fewer usable slots is worn, since no slice could travel while another is computed.
inline constexpr uint32_t kLeastUsableSlots = 2;

// A slot whose call ended before its reply came. The worker may still write there, so that the
// credit does not return before the very reply that was asked for arrives, or the path is renewed.
struct Quarantine {
  uint64_t call_id = 0;
  uint32_t layer = 0, shard = 0;
  uint16_t slice = 0, attempt = 0;
  int64_t limit_ns = 0;  // the attempt's
  // Whether another holder answered first. Otherwise the call has ended.
  bool is_superseded = false;
};

// One credit: free, in flight, or quarantined.
struct Slot {
  Attempt attempt;  // its slice is null where nothing is in flight
  std::optional<Quarantine> quarantine;
  bool is_free() const { return attempt.slice == nullptr && !quarantine; }
};

class Path {
 public:
  explicit Path(NewPath path);

  PathState state() const;
  // Why the path is worn or lost; empty otherwise.
  std::string reason() const;
  bool is_lost() const { return channel_ == nullptr; }
  uint64_t generation() const { return generation_; }
  // The channel; null once the path is lost.
  transport::Channel* channel() const { return channel_.get(); }
  const transport::SlotGeometry& geometry() const { return channel_->geometry(); }

  // -- credits --
  // Returns a slot for one more slice while fewer than `window` are in flight. A retired path has
  // none.
  std::optional<uint32_t> free_slot(uint32_t window) const;
  void put_in_flight(uint32_t slot, const Attempt& attempt);
  // Frees a slot whose reply, the very one that was asked for, has been consumed.
  void release(uint32_t slot);
  // Withholds the slots of a call that has ended without their replies, or of a slice that another
  // holder has answered.
  void quarantine_all_of(const Call& call);
  void supersede(const Slice& slice);
  bool has_in_flight(const Slice& slice) const;
  const Slot* slot(uint32_t index) const {
    return index < slots_.size() ? &slots_[index] : nullptr;
  }

  const std::vector<Slot>& slots() const { return slots_; }

  uint32_t num_in_flight() const { return num_in_flight_; }
  int64_t forecast_ns() const { return forecast_ns_; }  // predicted for all that is in flight
  uint32_t num_quarantined() const { return num_quarantined_; }
  // The longest limit of all answers that are owed, also of those that nobody needs any more.
  int64_t longest_limit_ns() const;
  bool owes() const { return num_in_flight_ > 0; }
  // Whether a message may arrive. Nobody listens to a retired path, because its worker may already
  // have closed its end, which would look like a hang-up.
  bool is_listening() const {
    return channel_ != nullptr && !is_retired_ && (num_in_flight_ > 0 || num_quarantined_ > 0);
  }

  // -- states --
  // From now on no call is cut for this path until it is renewed.
  void wear_out(std::string reason);
  // Whether the path is worn, has nothing in flight, and nobody has begun to renew it.
  bool is_ready_to_retire() const {
    return !is_retired_ && num_in_flight_ == 0 && state() == PathState::kWorn;
  }
  // Somebody renews the path from here on. Nothing is sent or taken any more, even if a late reply
  // frees a slot.
  void retire(std::string reason);
  bool is_retired() const { return is_retired_; }
  void renew(NewPath path);
  void lose(std::string reason);
  // Hands the path to a device step. It must be fresh or in use and owe nothing.
  void lease() { is_leased_ = true; }
  // Takes it back. `used` says how far the device used the ring; null means that nobody knows,
  // which wears the path out.
  void end_lease(const RingUse* used, bool has_failed);

 private:
  void quarantine(uint32_t slot, bool is_superseded);
  bool lacks_slots() const {
    return slots_.size() - num_quarantined_ < kLeastUsableSlots && num_quarantined_ > 0;
  }

  std::unique_ptr<transport::Channel> channel_;  // null once lost
  uint64_t generation_ = 0;
  std::vector<Slot> slots_;
  uint32_t num_in_flight_ = 0;
  int64_t forecast_ns_ = 0;
  uint32_t num_quarantined_ = 0;
  bool has_sent_ = false;
  bool is_leased_ = false;
  bool is_worn_ = false;  // worn for another reason than missing slots
  bool is_retired_ = false;
  std::string reason_;
};

}  // namespace dflash::client

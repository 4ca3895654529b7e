// One worker as the client sees it: its channel, credits, what it owes, and whether it is still
// alive. Guarded by the client's lock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "client/call.h"
#include "client/expert_client.h"

namespace dflash::client {

// A slot whose call ended before its reply came. The worker may still write there, so the credit
// stays away until the very reply that was asked for arrives, or the channel is replaced.
struct Quarantine {
  uint64_t call_id = 0;
  uint32_t layer = 0, shard = 0;
  uint16_t slice = 0;
};

struct Slot {
  Part* part = nullptr;  // in flight
  std::optional<Quarantine> quarantine;
  bool is_free() const { return part == nullptr && !quarantine; }
};

// "2.0 s"
std::string seconds_text(int64_t nanoseconds);

class WorkerEnd {
 public:
  explicit WorkerEnd(WorkerLink link);

  // Closes the channel and forgets the slots; the worker stays lost.
  void close(std::string why);
  // Fresh slots on a new channel; what was quarantined is forgotten with the old one.
  void replace_channel(std::unique_ptr<transport::Channel> channel, uint64_t generation);

  // A free slot within the window, or nothing.
  std::optional<uint32_t> acquire();
  // Parts that wait for a credit, first come first served.
  void enqueue(Part* part);
  Part* dequeue();
  void drop_waiting(const Call& call);
  int64_t waiting_forecast_ns() const { return waiting_forecast_ns_; }
  void put_in_flight(uint32_t slot, Part* part, int64_t now);
  // The slot's reply was consumed.
  void release(uint32_t slot);
  // The part's call ended without this reply.
  void quarantine(uint32_t slot);
  uint32_t num_in_flight() const { return num_in_flight_; }
  uint32_t num_quarantined() const { return num_quarantined_; }
  bool owes() const { return num_in_flight_ > 0; }
  bool is_listening() const {
    return link.channel != nullptr && (num_in_flight_ > 0 || num_quarantined_ > 0);
  }

  // A device step begins or ends here.
  void lease(int64_t now) {
    is_leased = true;
    last_change_ns_ = now;
  }

  // Reads every pulse that waits, without blocking. Returns why the worker must be given up, if so:
  // hang-up or garbage.
  std::optional<std::string> read_pulses(int64_t now);
  // The progress counter did not move for `stall_ns` while replies are owed. Never for a worker
  // without pulse (in this process).
  bool is_stalled(int64_t now, int64_t stall_ns) const;
  std::string stall_text(int64_t now) const {
    return "no progress for " + seconds_text(now - last_change_ns_);
  }

  WorkerLink link;
  std::vector<Slot> slots;
  std::deque<Part*> waiting;  // enqueue, dequeue, drop_waiting
  // slices in flight: the policy's, or what the model chose for the newest chunk
  uint32_t window = 0;
  WorkerModel model;
  uint32_t num_shard_calls = 0;  // shards of calls under way here
  int64_t crowded_ns = 0;        // when last a call came while another was under way
  bool is_leased = false;        // to a device step, which owes for it
  // a step failed on its data path: nothing more travels there
  bool is_retired = false;
  bool is_lost = false;
  std::string reason;
  uint64_t stale_replies = 0;
  std::map<uint32_t, Counters> counters;  // by layer
  uint32_t last_layer = 0;                // of the part sent last: where waiting time is booked

 private:
  int64_t waiting_forecast_ns_ = 0;
  bool read_once(int64_t now, std::optional<std::string>& failure);

  uint32_t num_in_flight_ = 0;
  uint32_t num_quarantined_ = 0;
  uint64_t last_counter_ = 0;
  int64_t last_change_ns_ = 0;         // of the counter, or when work was queued at an idle worker
  std::vector<std::byte> pulse_rest_;  // an incomplete pulse
};

}  // namespace dflash::client
